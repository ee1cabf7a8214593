# SPDX-License-Identifier: Apache-2.0
"""How peers keep a run going: who is waited for, how bytes travel, what is kept and told; and what is local to one.

Rules: `[node]` is local to a peer and `[coordinator]` to a coordinator; `[members]`, `[net]`, `[checkpoint]`, `[eval]`
and `[metrics]` are part of the run manifest. Must not know what is trained (`trainer.config.training`).
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from isthmus.trainer.config.quantities import Count, Nbytes, Seconds
from isthmus.trainer.config.values import Address, AutoOrCount, FixedAddress, Maybe, Rate, Section

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]
ActivationCheckpointing = Literal["none", "selective", "full"]


class MembersSection(Section):
    """`[members]`: who takes part, and how long one waits for whom."""

    start_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Training starts when so many are there (and `min_peers`)."""
    min_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Nothing is committed by fewer; the others wait."""
    heartbeat_interval_s: Annotated[Seconds, Field(gt=0, le=60)] = 1.0
    """Between two signs of life of a peer."""
    heartbeat_timeout_s: Annotated[Seconds, Field(gt=0, le=3600)] = 5.0
    """Silence after which a member is put out of the view."""
    reconnect_grace_s: Annotated[Seconds, Field(gt=0, le=3600)] = 1.0
    """How long a member whose connection broke may take to come back."""
    stall_timeout_s: Annotated[Seconds, Field(gt=0, le=86400)] = 20.0
    """A member that answers but gets nothing done is given at least so long; longer if its steps are slow."""
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A round goes on without the late ones when this share of the members has handed in; 1: it waits for all."""
    grace_s: Annotated[Seconds, Field(gt=0, le=86400)] = 5.0
    """How long it waits for the others then, at least; longer where members are usually further apart."""
    patience: Annotated[float, Field(ge=0, le=100)] = 0.5
    """For how many times its own work of a round a slow peer lets the others wait; then it hands in what it has."""
    equal_steps: bool = False
    """Whether every peer makes all inner steps of a round, and the fast ones wait for the slow. Else a slow peer leaves
    some out, so that all come together, and its work weighs less."""
    recover_s: Annotated[Seconds, Field(gt=0, le=86400)] = 30.0
    """When nobody holds the newest outer step any more, as after a power cut: how long half of its members wait for
    it before the run goes back to what they hold. At once when all are back."""
    durable: bool = False
    """Whether a peer writes a result to its disk before it votes for it: then a power cut of all loses no commit."""
    norm_guard: Annotated[float, Field(gt=1, le=1e30)] = 10.0
    """A payload whose numbers are so many times larger than the others' is left out of the mean; 1e30: none is."""
    outage_s: Annotated[Seconds, Field(gt=0, le=30 * 86400)] = 600.0
    """How long a peer looks for a lost coordinator before it gives up with exit code 4. Likewise if nobody gives the
    shard that it needs to train on."""
    ticket_lifetime_s: Annotated[Seconds, Field(gt=0, le=365 * 86400)] = 7 * 86400.0
    """How long a ticket lets strangers in."""

    @model_validator(mode="after")
    def _several_heartbeats_fit(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout must be at least twice heartbeat_interval")
        return self


class NetSection(Section):
    """`[net]`: how bytes travel between peers."""

    tls: Literal["auto", "on", "off"] = "auto"
    """Which connections are encrypted: those that leave a machine, all, or none."""
    num_streams: Maybe[Annotated[int, Field(ge=1, le=64)]] = None
    """TCP connections for each pair of peers; none: one to a near peer, more where the path is long."""
    chunk_nbytes: Annotated[Nbytes, Field(ge=4096, le=16 * 2**20, multiple_of=4096)] = 2**20
    """Unit of pipelining, checking and repeating."""


class CheckpointSection(Section):
    """`[checkpoint]`: the shared state on every peer's disk."""

    every: Annotated[int, Field(ge=0)] = 10
    """Outer steps between two; 0: none but the last."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 3
    """How many stay, the newest ones."""


class EvalSection(Section):
    """`[eval]`: loss on held-out text, judged by one member at a time, while all train."""

    every: Annotated[Count, Field(ge=0)] = 100_000
    """Tokens of the run between two, such as "10M"; 1: after every outer step; 0: never."""
    batches: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Batches of held-out text that it is the mean of."""


class MetricsSection(Section):
    """`[metrics]`: numbers for Prometheus and a page for a browser, at `node.metrics_host`."""

    port: Maybe[Annotated[int, Field(ge=0, le=65535)]] = 0
    """0: a free port, which `isthmus status` tells; none: neither. A peer may say otherwise: `node.metrics_port`."""


class CoordinatorSection(Section):
    """`[coordinator]`: where this coordinator keeps the journal, and who else can coordinate. Peers need not know."""

    store: Literal["sqlite", "etcd"] = "sqlite"
    """A file in this process's folder, or an etcd cluster (3.4 or newer), which several coordinators can share."""
    etcd: Annotated[tuple[FixedAddress, ...], Field(max_length=16)] = ()
    """Nodes of the cluster, the nearest first."""
    etcd_ca: Maybe[Path] = None
    """PEM of the authority that signed the nodes' certificates; none: the connections to etcd are plain."""
    etcd_cert: Maybe[Path] = None
    """PEM of our certificate, if etcd asks for one."""
    etcd_key: Maybe[Path] = None
    """PEM of its private key."""
    etcd_user: Maybe[str] = None
    """Name of an etcd user, where the cluster asks for one."""
    etcd_password_file: Maybe[Path] = None
    """File with its password."""
    etcd_patience_s: Annotated[Seconds, Field(gt=0, le=30 * 86400)] = 600.0
    """How long the run pauses while etcd gives no answer, before the coordinator ends."""
    addresses: Annotated[tuple[FixedAddress, ...], Field(max_length=16)] = ()
    """Where the run's coordinators listen, this one and its standbys; peers learn them by their ticket."""

    compact_every: Annotated[int, Field(ge=0, le=10_000_000)] = 20_000
    """Records of the journal, at least, after which it is compacted: a snapshot of what they come to is written, and
    they go to an archive, journal-0001.sqlite and so on, or stay where they are in etcd; 0: never."""
    keep_archives: Annotated[int, Field(ge=0, le=10_000)] = 0
    """How many archives stay; 0: all. Without them `isthmus audit` cannot prove what is in them."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.store == "etcd" and not self.etcd:
            raise ValueError('store = "etcd" needs to know its nodes; add for example etcd = ["127.0.0.1:2379"]')
        if self.store == "sqlite" and (self.etcd or self.addresses):
            given = "etcd" if self.etcd else "addresses"
            raise ValueError(f'{given} is given, but store is "sqlite", a file of one coordinator; add store = "etcd"')
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ValueError("etcd_cert and etcd_key belong together; give both or none")
        if self.etcd_cert is not None and self.etcd_ca is None:
            raise ValueError("etcd_cert is shown on encrypted connections only; add etcd_ca")
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            raise ValueError("etcd_user and etcd_password_file belong together; give both or none")
        return self


class NodeSection(Section):
    """`[node]`: this machine."""

    dir: Maybe[Path] = None
    """Folder of this peer: identity, journal, checkpoints, events; none: `runs/` and the name of the run."""
    local_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Worker processes, one a GPU."""
    device: Device = "auto"
    """Where the workers compute; auto: on GPUs, if there are any."""
    precision: Precision = "auto"
    """What the workers compute in: fp32, bf16, or auto: bf16 on GPUs and fp32 elsewhere. Parameters, the optimizer and
    sums of gradients are fp32 always."""
    tf32: bool = True
    """Whether GPUs multiply matrices of fp32 in TF32, which rounds them to 10 bits and is several times as fast."""
    micro_batch: AutoOrCount = "auto"
    """Samples that one worker computes at a time; auto: its whole share of `inner.batch_size`, and half of it as often
    as that does not fit into memory."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What is computed again in the backward pass, to need less memory: none; selective: all but products of matrices
    and attention; full: all of each block."""
    compile: bool = False
    """Whether torch.compile makes kernels for the blocks of the model, at the first step."""
    checkpoints: Maybe[Annotated[str, Field(min_length=1, max_length=2048)]] = None
    """Where this peer's checkpoints go a second time, `checkpoint.keep` of them: a folder, or a URL that fsspec knows
    ("s3://bucket/run" with s3fs installed); none: nowhere. Each peer has a folder of its own in it, by its id."""
    ignore_memory: bool = False
    """Whether to begin even if memory or disk seem to be too small for the run."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of one worker; 0: as many as there are cores for it, within the quota of its container or unit; fewer
    while other peers are on this machine."""
    hang_timeout_s: Annotated[Seconds, Field(gt=0, le=86400)] = 60.0
    """A worker that gives no answer for so long, and for ten times as long as that took before, is replaced."""
    listen: Address = "*:0"
    """`host:port`; host "*" is every interface of this machine, "127.0.0.1" keeps the peer at home."""
    advertise: Maybe[FixedAddress] = None
    """Where others reach this peer, beside the machine's own addresses if it listens on every interface."""
    max_upload_bytes_per_s: Maybe[Rate] = None
    """What exchanges and state for joiners may send together; none: no bound."""
    max_download_bytes_per_s: Maybe[Rate] = None
    """What exchanges may receive; none: no bound."""
    events_nbytes: Annotated[Nbytes, Field(ge=2**16, le=2**40)] = 64 * 2**20
    """Size from which on events.jsonl goes on in a new file."""
    events_keep: Annotated[int, Field(ge=0, le=10_000)] = 16
    """How many older ones stay, events-0001.jsonl and so on; 0: all."""
    data: Maybe[Annotated[str, Field(min_length=1, max_length=4096)]] = None
    """Where this peer has the run's text: a file, a folder, or the URL of a prepared one (s3://bucket/text), whose
    shards are fetched ahead of need; none: at `data.path`, or else the run's peers give it."""
    data_cache_nbytes: Maybe[Annotated[Nbytes, Field(ge=1)]] = None
    """About how much of the fetched shards of a prepared text stays on the disk; none: all."""
    model: Maybe[Path] = None
    """Where this peer keeps the model of `model.path`; none: there."""
    metrics_host: Annotated[str, Field(pattern=r"^[0-9.]{7,15}$")] = "127.0.0.1"
    """Where metrics and the page are, for whoever asks: an IPv4 address of this machine; 0.0.0.0: all, unencrypted."""
    metrics_port: Maybe[Annotated[int, Field(ge=0, le=65535)]] = None
    """Instead of `metrics.port`."""

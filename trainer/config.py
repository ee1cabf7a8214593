"""What a run and a peer can be told: the sections of the TOML file, their defaults and ranges, the run manifest.

Rules: a key stands in one section with one meaning; a quantity's Python name ends in its unit and its TOML key does
not (`heartbeat_timeout_s` is `heartbeat_timeout = "10s"`); "none" is TOML's way to say None. `[node]` is local to a
peer and `[coordinator]` to a coordinator; all other sections are the run manifest, which is equal on all peers,
canonical JSON byte for byte. Must not know where values come from (`trainer.config_sources`), nor torch: the command
line starts quickly.

Errors: `ConfigError` (2) for a value that cannot be; `Refused` (5) for a manifest that we do not understand.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from trainer.errors import ConfigError, Refused
from trainer.quantities import BytesPerSecond, Count, Nbytes, Seconds

if TYPE_CHECKING:
    from trainer.model import ModelConfig

MANIFEST_FORMAT = 1
"""Grows when a manifest of an older program can no longer be understood."""

MAX_MANIFEST_NBYTES = 64 * 1024

LOCAL_SECTIONS = frozenset({"node", "coordinator"})
"""What is no part of the manifest."""

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
T = TypeVar("T")

_UNIT_SUFFIXES = ("_nbytes", "_bytes_per_s", "_s")
_LEAST_RATE = 16_000.0
"""Bytes a second. Under less the others would take a peer for one that stands still."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


def _toml_key(field: str) -> str:
    """The key of a field: its name without the unit."""
    for suffix in _UNIT_SUFFIXES:
        if field.endswith(suffix):
            return field.removesuffix(suffix)
    return field


def _word_none(value: object) -> object:
    return None if value == "none" else value


def _address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        raise ValueError('expected host:port, such as "127.0.0.1:0" or "[::]:7000"')
    return value


def _fixed_address(value: str) -> str:
    if _address(value).endswith(":0"):
        raise ValueError("expected a port that others can know, not 0")
    return value


def _rate(value: float) -> float:
    if value < _LEAST_RATE:
        raise ValueError('expected at least "128kbit", which is 16000 bytes a second')
    return value


def _name(value: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise ValueError("expected up to 48 lower-case letters, digits, dots, hyphens and underscores")
    return value


Maybe = Annotated[T | None, BeforeValidator(_word_none)]
"""A value, or the word "none"."""

Address = Annotated[str, Field(max_length=256), AfterValidator(_address)]
"""`host:port`; port 0 lets the system choose."""

FixedAddress = Annotated[str, Field(max_length=256), AfterValidator(_fixed_address)]
"""`host:port` to dial."""

Rate = Annotated[BytesPerSecond, AfterValidator(_rate)]
"""Bytes a second that a line may carry."""

Fraction = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
Portion = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        alias_generator=_toml_key,
        populate_by_name=True,
        protected_namespaces=(),
    )


class RunSection(_Section):
    """`[run]`: what the run is called and how long it lasts."""

    name: Annotated[str, AfterValidator(_name)] = "run"
    outer_steps: Annotated[Count, Field(ge=1, le=2**40)] = 100
    """Exchanges after which the run is done; with fragments each is of one of them."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Of the first weights and of the order of the data."""


class ModelSection(_Section):
    """`[model]`: a preset of trainer/model.py; every other key replaces one of the preset's values."""

    preset: str = "tiny"
    seq_len: Maybe[Annotated[Count, Field(ge=1)]] = None
    """Tokens in a sample; none: the preset's longest."""
    tie_embeddings: Maybe[bool] = None
    dim: Maybe[Annotated[int, Field(ge=1)]] = None
    num_layers: Maybe[Annotated[int, Field(ge=1)]] = None
    num_heads: Maybe[Annotated[int, Field(ge=1)]] = None
    num_kv_heads: Maybe[Annotated[int, Field(ge=1)]] = None
    hidden_dim: Maybe[Annotated[int, Field(ge=1)]] = None
    rope_theta: Maybe[Positive] = None
    norm_eps: Maybe[Positive] = None

    def decoder_config(self) -> "ModelConfig":
        """The shape of the decoder.

        Raises:
            ConfigError: there is no such preset, or the values do not fit each other.
        """
        from trainer.model import preset

        overrides = self.model_dump(exclude={"preset", "seq_len"}, exclude_none=True)
        if self.seq_len is not None:
            overrides["max_seq_len"] = self.seq_len
        try:
            return preset(self.preset, **overrides)
        except ValueError as error:
            raise ConfigError(f"[model] cannot be built: {str(error).rstrip('.')}", key="model") from error


class DataSection(_Section):
    """`[data]`: the text to train on."""

    path: Maybe[Path] = None
    """A file or folder; none: the Python standard library's own sources. A peer may keep it elsewhere: `node.data`."""
    validation_fraction: Maybe[Fraction] = None
    """Share that is held out; none: 0.02 of the standard library, 0.1 of other text."""
    limit_nbytes: Maybe[Annotated[Nbytes, Field(ge=1)]] = None
    """Read at most so much of it."""


class _Schedule(_Section):
    warmup_steps: Maybe[Annotated[Count, Field(ge=0)]] = None
    """Inner steps over which the rate rises linearly; none: a twentieth of the run's, at most 100. A peer that comes
    later begins without the inner optimizer's moments, and rises over as many of its own."""


class CosineSchedule(_Schedule):
    """Warm up, then fall along half a cosine until the run's last inner step."""

    type: Literal["cosine"] = "cosine"
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The last learning rate, as a fraction of `lr`."""


class WsdSchedule(_Schedule):
    """Warm up, stay, decay linearly over the last steps."""

    type: Literal["wsd"] = "wsd"
    decay_steps: Maybe[Annotated[Count, Field(ge=0)]] = None
    """Inner steps of the decay; none: a fifth of the run's."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class ConstantSchedule(_Schedule):
    """Warm up, then stay."""

    type: Literal["constant"] = "constant"


Schedule = Annotated[CosineSchedule | WsdSchedule | ConstantSchedule, Field(discriminator="type")]


class _Inner(_Section):
    lr: Positive = 1e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    batch_size: Annotated[int, Field(ge=1, le=2**31 - 1)] = 16
    """Samples of one inner step of one peer, over all its workers."""
    micro_batch: Maybe[Annotated[int, Field(ge=1)]] = None
    """Samples in memory at once; none: all. Divides `batch_size`."""
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0: no limit."""
    schedule: Schedule = Field(default_factory=CosineSchedule)

    @model_validator(mode="after")
    def _micro_batch_divides(self) -> Self:
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(f"micro_batch {self.micro_batch} does not divide batch_size {self.batch_size}")
        return self


class AdamW(_Inner):
    """`[inner]` with `type = "adamw"`: what a peer does between exchanges."""

    type: Literal["adamw"] = "adamw"
    betas: tuple[Portion, Portion] = (0.9, 0.99)
    eps: Positive = 1e-8


class Sgd(_Inner):
    """`[inner]` with `type = "sgd"`: plain, without momentum."""

    type: Literal["sgd"] = "sgd"


class Adopt(_Inner):
    """`[inner]` with `type = "adopt"`: Adam that converges with any second decay rate (arXiv:2411.02853)."""

    type: Literal["adopt"] = "adopt"
    betas: tuple[Portion, Portion] = (0.9, 0.9999)
    eps: Positive = 1e-6


class Muon(_Inner):
    """`[inner]` with `type = "muon"`: orthogonal steps for hidden matrices, AdamW for the rest, one learning rate."""

    type: Literal["muon"] = "muon"
    momentum: Portion = 0.95
    """Nesterov's, of the hidden matrices."""
    betas: tuple[Portion, Portion] = (0.9, 0.99)
    """Of the rest."""
    eps: Positive = 1e-8


InnerSection = Annotated[AdamW | Sgd | Adopt | Muon, Field(discriminator="type")]


class _Outer(_Section):
    lr: Maybe[Positive] = None
    """Outer learning rate; none: by the number of peers that are waited for at the start."""
    momentum: Portion = 0.9
    inner_steps: Annotated[Count, Field(ge=1, le=10**6)] = 100
    """Inner steps between two exchanges of the same parameters."""
    codec: Literal["raw", "bf16", "int8", "e3m0"] = "int8"
    """What crosses the network: fp32, or 16, 8 or 4 bits a value."""


class Diloco(_Outer):
    """`[outer]` with `type = "diloco"`: how the peers' work becomes one model. All of it at once; the workers wait."""

    type: Literal["diloco"] = "diloco"


class Streaming(_Outer):
    """`[outer]` with `type = "streaming"`: layers take turns, and the workers go on meanwhile (arXiv:2501.18512)."""

    type: Literal["streaming"] = "streaming"
    num_fragments: Maybe[Annotated[int, Field(ge=1, le=4096)]] = None
    """Parts of the model that take turns; none: one for every three layers."""
    pattern: Literal["strided", "sequential"] = "strided"
    """Every P-th layer makes a fragment, or neighbours do."""
    delay: Annotated[int, Field(ge=0, le=10**6)] = 1
    """Inner steps that the workers go on while a fragment is under way; 0: they wait."""
    keep: Annotated[float, Field(ge=0, le=1)] = 0.5
    """How much of a local value survives the outcome; 0: it is replaced."""


OuterSection = Annotated[Diloco | Streaming, Field(discriminator="type")]


class MembersSection(_Section):
    """`[members]`: who takes part, and how long one waits for whom."""

    start_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Training starts when so many are there (and `min_peers`)."""
    min_peers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Nothing is committed by fewer; the others wait."""
    heartbeat_interval_s: Annotated[Seconds, Field(gt=0, le=60)] = 1.0
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
    outage_s: Annotated[Seconds, Field(gt=0, le=30 * 86400)] = 600.0
    """How long a peer looks for a lost coordinator before it gives up with exit code 4."""
    ticket_lifetime_s: Annotated[Seconds, Field(gt=0, le=365 * 86400)] = 7 * 86400.0

    @model_validator(mode="after")
    def _several_heartbeats_fit(self) -> Self:
        if self.heartbeat_timeout_s < 2 * self.heartbeat_interval_s:
            raise ValueError("heartbeat_timeout must be at least twice heartbeat_interval")
        return self


class NetSection(_Section):
    """`[net]`: how bytes travel between peers."""

    tls: Literal["auto", "on", "off"] = "auto"
    """Which connections are encrypted: those that leave a machine, all, or none."""
    num_streams: Maybe[Annotated[int, Field(ge=1, le=64)]] = None
    """TCP connections for each pair of peers; none: one to a near peer, more where the path is long."""
    chunk_nbytes: Annotated[Nbytes, Field(ge=4096, le=16 * 2**20, multiple_of=4096)] = 2**20
    """Unit of pipelining, checking and repeating."""


class CheckpointSection(_Section):
    """`[checkpoint]`: the shared state on every peer's disk."""

    every: Annotated[int, Field(ge=0)] = 10
    """Outer steps between two; 0: none but the last."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 3


class EvalSection(_Section):
    """`[eval]`: loss on held-out text."""

    every: Annotated[int, Field(ge=0)] = 1
    """Outer steps between two; 0: never."""
    batches: Annotated[int, Field(ge=1, le=100_000)] = 8


class MetricsSection(_Section):
    """`[metrics]`: numbers for Prometheus, on 127.0.0.1."""

    port: Maybe[Annotated[int, Field(ge=0, le=65535)]] = 0
    """0: a free port, which `isthmus status` tells; none: no metrics. A peer may say otherwise: `node.metrics_port`."""


class CoordinatorSection(_Section):
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
    etcd_user: Maybe[str] = None
    etcd_password_file: Maybe[Path] = None
    etcd_patience_s: Annotated[Seconds, Field(gt=0, le=30 * 86400)] = 600.0
    """How long the run pauses while etcd gives no answer, before the coordinator ends."""
    addresses: Annotated[tuple[FixedAddress, ...], Field(max_length=16)] = ()
    """Where the run's coordinators listen, this one and its standbys; peers learn them by their ticket."""

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


class NodeSection(_Section):
    """`[node]`: this machine."""

    dir: Maybe[Path] = None
    """Folder of this peer: identity, journal, checkpoints, events; none: `runs/` and the name of the run."""
    local_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Worker processes, one a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU threads of one worker; 0: as many as there are cores for it."""
    listen: Address = "127.0.0.1:0"
    advertise: Maybe[Address] = None
    """Where other peers reach this one, if that is not `listen`."""
    max_upload_bytes_per_s: Maybe[Rate] = None
    """What exchanges and state for joiners may send together; none: no bound."""
    max_download_bytes_per_s: Maybe[Rate] = None
    """The same for what they receive."""
    commit_log_nbytes: Maybe[Annotated[Nbytes, Field(ge=0)]] = None
    """Memory for the newest results, for peers that come back; none: one copy of the shared state. More never pays."""
    data: Maybe[Path] = None
    """Where this peer keeps the text of `data.path`."""
    metrics_port: Maybe[Annotated[int, Field(ge=0, le=65535)]] = None
    """Instead of `metrics.port`."""


class Config(_Section):
    """Everything. Frozen: `trainer.config_sources.load_config` makes it."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    inner: InnerSection = Field(default_factory=AdamW)
    outer: OuterSection = Field(default_factory=Diloco)
    members: MembersSection = Field(default_factory=MembersSection)
    net: NetSection = Field(default_factory=NetSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    coordinator: CoordinatorSection = Field(default_factory=CoordinatorSection)
    node: NodeSection = Field(default_factory=NodeSection)

    @property
    def data_path(self) -> Path | None:
        """Where this peer reads its text; None is the standard library."""
        return self.node.data if self.node.data is not None else self.data.path

    @property
    def metrics_port(self) -> int | None:
        """Where this peer tells its metrics; 0 is any free port, None is nowhere."""
        return self.node.metrics_port if self.node.metrics_port is not None else self.metrics.port

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are exchanged in turn, with the default worked out.

        Raises:
            ConfigError: the default is asked for, and the model cannot be built.
        """
        if not isinstance(self.outer, Streaming):
            return 1
        if self.outer.num_fragments is not None:
            return self.outer.num_fragments
        from optim.fragments import FragmentTable
        from optim.streaming import default_num_fragments
        from trainer.model import named_shapes

        return default_num_fragments(FragmentTable.from_named_shapes(named_shapes(self.model.decoder_config())))

    @property
    def inner_steps_per_round(self) -> int:
        """Inner steps between two exchanges; one less between some, if fragments do not divide `outer.inner_steps`."""
        return -(-self.outer.inner_steps // self.num_fragments)

    @property
    def total_inner_steps(self) -> int:
        """Inner steps of a peer that takes part from the start to the end; the length of the schedule."""
        return self.run.outer_steps * self.outer.inner_steps // self.num_fragments

    @classmethod
    def from_manifest(cls, manifest: bytes, *, node: NodeSection | None = None) -> Self:
        """The shared sections of a manifest with this machine's own (or default) `[node]`.

        Raises:
            Refused: it is no manifest, or one of another version.
        """
        config = cls.model_validate_json(json.dumps(manifest_sections(manifest)))
        return config if node is None else config.model_copy(update={"node": node})

    @property
    def warmup_steps(self) -> int:
        """Inner steps of the warm-up, with the default worked out."""
        given = self.inner.schedule.warmup_steps
        return given if given is not None else min(100, self.total_inner_steps // 20)

    @property
    def decay_steps(self) -> int:
        """Inner steps of the last decay, with the default worked out; 0 where the schedule has none."""
        if not isinstance(self.inner.schedule, WsdSchedule):
            return 0
        given = self.inner.schedule.decay_steps
        return given if given is not None else self.total_inner_steps // 5

    @model_validator(mode="after")
    def _fragments_take_turns(self) -> Self:
        if not isinstance(self.outer, Streaming):
            return self
        inner_steps, count = self.outer.inner_steps, self.num_fragments
        if count > inner_steps:
            raise ValueError(
                f"outer.num_fragments is {count}, but only {inner_steps} fragments can have their turn in "
                f"outer.inner_steps = {inner_steps}; take fewer fragments or more inner steps"
            )
        apart = inner_steps // count
        longest = min(apart, inner_steps - 1)
        if self.outer.delay > longest:
            raise ValueError(
                f"outer.delay is {self.outer.delay}, but rounds come one at a time, and two fragments' turns are as "
                f"close as {apart} inner steps (outer.inner_steps by outer.num_fragments = {count}); give a delay of "
                f"at most {longest}"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Self:
        least_rest = 1 if isinstance(self.inner.schedule, CosineSchedule) else 0
        needed = self.warmup_steps + self.decay_steps + least_rest
        if self.inner.schedule.type != "constant" and needed > self.total_inner_steps:
            raise ValueError(
                f"inner.schedule needs at least {needed} inner steps for its warm-up and decay, but the run has "
                f"{self.total_inner_steps} (run.outer_steps times outer.inner_steps{_by_fragments(self.num_fragments)})"
            )
        return self

    def tree(self) -> dict[str, Json]:
        """All values by TOML key, as JSON knows them."""
        values: dict[str, Json] = self.model_dump(mode="json", by_alias=True)
        return values

    def manifest_json(self) -> bytes:
        """The run manifest: all sections but the local ones, as canonical JSON (sorted keys, no spaces, ASCII)."""
        shared = {name: section for name, section in self.tree().items() if name not in LOCAL_SECTIONS}
        return canonical_json({"format": MANIFEST_FORMAT} | shared)

    def manifest_digest(self) -> bytes:
        """SHA-256 of `manifest_json`, 32 bytes; peers compare it at join."""
        return manifest_digest(self.manifest_json())


def _by_fragments(count: int) -> str:
    return "" if count == 1 else f", by {count} fragments"


def canonical_json(value: Json) -> bytes:
    """The one spelling of a JSON value: equal values give equal bytes, on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def manifest_digest(manifest: bytes) -> bytes:
    """SHA-256 of a manifest, 32 bytes."""
    return hashlib.sha256(manifest).digest()


def manifest_sections(manifest: bytes) -> dict[str, Json]:
    """The sections of a manifest, checked for being one.

    Raises:
        Refused: it is none, or one of another version of this program.
    """
    upgrade = "run the same version of isthmus on all peers"
    if len(manifest) > MAX_MANIFEST_NBYTES:
        raise Refused(f"the run's manifest has {len(manifest)} bytes, more than {MAX_MANIFEST_NBYTES}", cure=upgrade)
    try:
        tree = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise Refused("the run's manifest is not JSON", cure=upgrade) from error
    if not isinstance(tree, dict) or not LOCAL_SECTIONS.isdisjoint(tree):
        raise Refused("the run's manifest is not a table of shared sections", cure=upgrade)
    version = tree.pop("format", None)
    if version != MANIFEST_FORMAT:
        raise Refused(f"the run's manifest has format {version}, we know {MANIFEST_FORMAT}", cure=upgrade)
    try:
        Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise Refused(f"the run's manifest holds {where}, which we do not understand", cure=upgrade) from error
    return tree


def without_key(manifest: bytes, section: str, key: str) -> bytes:
    """The manifest without one of its values, which takes its default then.

    A resumed run need not wait for as many peers as its first start did.

    Raises:
        Refused: it is no manifest.
    """
    sections = manifest_sections(manifest)
    kept = sections[section]
    assert isinstance(kept, dict), "manifest_sections has checked it"
    trimmed = sections | {section: {name: value for name, value in kept.items() if name != key}}
    return canonical_json({"format": MANIFEST_FORMAT} | trimmed)


def manifest_diff(ours: bytes, theirs: bytes) -> tuple[tuple[str, Json, Json], ...]:
    """Where two manifests differ: (key, our value, their value); None for a value that is not there.

    Raises:
        Refused: one of them is no manifest.
    """
    a, b = (dict(flatten(manifest_sections(manifest))) for manifest in (ours, theirs))
    return tuple((key, a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key))


def flatten(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """(dotted key, value) of every value that is no table."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

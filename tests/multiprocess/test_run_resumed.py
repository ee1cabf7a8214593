# SPDX-License-Identifier: Apache-2.0
"""Everything that a run's peers have is on their disks, and goes on with other peers, workers and shards.

Three peers of one worker train, and two of them go on from the checkpoint in the middle with two workers each. What the
two runs report of their next round is compared with one function: the losses that follow from that checkpoint, from the
peer's own moments beside it, and from the samples that the peer has trained on, as the journals tell.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, Checkpoint, CheckpointStore, load_checkpoint
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_FOLDER_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.config.manifest import config_of
from isthmus.trainer.config.outer_method import tokens_per_sample
from isthmus.trainer.config.wiring import fragments_of, outer_of, training_job
from isthmus.trainer.data.corpus import load_corpus
from isthmus.trainer.engine.own_state import InnerState
from isthmus.trainer.engine.state_version import gather_anchor
from isthmus.trainer.workers.inner_loop import InnerLoop
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

SAVED_AT = 4
FLAGS = ["--checkpoint.every", str(SAVED_AT), "--inner.lr", "1e-2", "--inner.schedule.warmup-steps", "2"]
# Moments show from the second inner step of a round on, and on a busy machine a slow peer would leave it out.
FLAGS += ["--members.equal-steps", "true", "--members.patience", "100", "--outer.inner-steps", "8"]


def test_two_peers_of_two_workers_go_on_exactly_where_three_of_one_worker_were(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        copies = f"file://{tmp_path}/elsewhere"
        flags = ["--node.checkpoints", copies, "--outer-steps", str(SAVED_AT + 2), *FLAGS]
        peers = [run.found("--peers", "3", "--min-peers", "3", *flags)]
        run.wait_for_ticket()
        peers += [run.join(), run.join()]
        assert run.until_ended(*peers) == [0, 0, 0]
        begins = [Beginning(peer) for peer in peers[:2]]
        before = [Told(peer, peers[0], tmp_path / "text.txt") for peer in peers[:2]]

        # The founder's disk is lost: what it had is fetched from where it was copied to.
        there = f"{copies}/{peers[0].peer_id}/checkpoints/step-{SAVED_AT:08d}"
        flags = ["--peers", "2", "--min-peers", "2", "--local-workers", "2", "--outer-steps", str(OPEN_END)]
        resumed = [run.found("--resume", there, *flags)]
        run.wait_for_ticket()
        resumed.append(run.join("--local-workers", "2", folder=peers[1].directory))
        run.until_step(SAVED_AT + 4, *resumed)
        run.leave_all()
        after = [Told(peer, resumed[0], tmp_path / "text.txt") for peer in resumed]
        look_at_checkpoints(run, peers[2].directory)
    # Of peers that begin in the middle one may have to hand in before its first step is done.
    assert all(told.samples for told in before)
    assert any(told.samples for told in after)
    for begin, *both in zip(begins, before, after, strict=True):
        for told in both:
            if told.samples:
                expected = told.expected(begin.checkpoint, begin.own)
                assert told.loss == pytest.approx(expected, rel=1e-5), "as if it had never stopped"
    fresh = before[0].expected(begins[0].checkpoint, None)
    assert before[0].loss != pytest.approx(fresh, rel=1e-4), "moments matter, ten times as much as may differ"
    for peer in resumed:
        assert f"moments_remembered outer_step={SAVED_AT} " in peer.console.with_suffix(".err").read_text()
    # Whoever left last has everything that it ended with: the same command goes on from there.
    last = max(resumed, key=lambda peer: peer.step)
    own = PrivateFiles(last.directory / PRIVATE_FOLDER_NAME, "", keep=1)
    assert own.steps()[-1] == CheckpointStore(last.directory / FOLDER_NAME, keep=1).steps()[-1] == last.step


def test_a_peer_in_the_folder_of_an_older_run_keeps_and_exports_what_its_new_one_made(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--min-peers", "2", "--checkpoint.keep", "2")
        peers = [run.found("--outer-steps", "9", "--checkpoint.every", "3", *flags)]
        run.wait_for_ticket()
        peers.append(run.join())
        assert run.until_ended(*peers) == [0, 0], run.story()
        again = [run.found("--outer-steps", "2", "--checkpoint.every", "1", *flags)]
        run.wait_for_ticket()
        again.append(run.join(folder=peers[1].directory))
        assert run.until_ended(*again) == [0, 0], run.story()
        out = str(tmp_path / "model")
        exported = json.loads(run.command("export", "--json", "--dir", str(again[1].directory), "--out", out).out)
        assert run.command("ckpt", "verify", "--dir", str(again[1].directory)).code == 0
    (run_id,) = {event["run_id"] for event in again[0].events("started")}
    assert (exported["run_id"], exported["outer_step"]) == (run_id, 2)
    store = CheckpointStore(again[1].directory / FOLDER_NAME, keep=9)
    assert [store.run_of(step) for step in store.steps()] == [run_id, run_id]
    aside = CheckpointStore(again[1].directory / "lineage-1" / FOLDER_NAME, keep=9)
    # While one is being written the next one is skipped.
    assert len(aside.steps()) == 2
    assert aside.steps()[-1] == 9


def look_at_checkpoints(run: Run, folder: Path) -> None:
    """`isthmus ckpt` in the folder of a peer that has ended."""
    listed = json.loads(run.command("ckpt", "list", "--json", "--dir", str(folder)).out)
    assert listed["schema"] == "isthmus.checkpoints/1"
    told = [(saved["outer_step"], saved["certified"], saved["has_own_state"]) for saved in listed["checkpoints"]]
    assert told[-2:] == [(SAVED_AT, True, True), (SAVED_AT + 2, True, True)]
    assert run.command("ckpt", "verify", "--dir", str(folder)).code == 0
    state = folder / "checkpoints" / f"step-{SAVED_AT:08d}" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    found = run.command("ckpt", "verify", "--dir", str(folder))
    assert (found.code, str(state) in found.err) == (9, True)
    assert "add --yes" in run.command("ckpt", "prune", "--keep", "1", "--dir", str(folder)).out
    assert state.exists()
    assert run.command("ckpt", "prune", "--keep", "1", "--yes", "--dir", str(folder)).code == 0
    assert run.command("ckpt", "verify", "--dir", str(folder)).code == 0


class Beginning:
    """What a peer's disk has of the outer step in the middle: the shared state, and its own."""

    def __init__(self, peer: Process) -> None:
        store = CheckpointStore(peer.directory / FOLDER_NAME, keep=1)
        self.checkpoint = load_checkpoint(store.path_of(SAVED_AT))
        meta = self.checkpoint.meta
        found = PrivateFiles(peer.directory / PRIVATE_FOLDER_NAME, meta.run_id, keep=1).recall(
            Held(OuterStep(meta.outer_step), meta.digest)
        )
        assert found is not None
        assert found.is_exact
        assert found.inner is not None
        self.own = found.inner


class Told:
    """What a peer of a run that has ended tells of the round after that checkpoint.

    Attributes:
        loss: the mean of its inner steps.
        samples: that they were made on, in their order.
    """

    def __init__(self, peer: Process, founder: Process, text: Path) -> None:
        self._text = text
        (commit,) = (
            record for record in Audit.of(read_journal(founder.directory)).commits if record.outer_step == SAVED_AT + 1
        )
        (given,) = (item for item in commit.contributions if item.ref.peer_id == peer.peer_id)
        self.samples = [index for part in given.consumed for index in range(part.start, part.stop)]
        # The folder may hold the events of the run before as well: the newest ones count.
        self.loss = peer.events("trained", outer_step=SAVED_AT + 1)[-1]["loss"]
        newest = CheckpointStore(founder.directory / FOLDER_NAME, keep=1).load_newest()
        assert newest is not None
        self._config = config_of(newest.meta.run_manifest)

    def expected(self, checkpoint: Checkpoint, own: InnerState | None) -> float:
        """What follows from checkpoint, moments and samples: the mean loss of one worker that never stopped."""
        config = self._config
        corpus = load_corpus(self._text, seq_len=tokens_per_sample(config.model))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            loop = InnerLoop(training_job(config), mesh=mesh, train=corpus.train, validation=corpus.validation)
            anchor = torch.empty(loop.numel)
            gather_anchor(checkpoint.tensors, fragments_of(config), out=anchor)
            loop.load(anchor)
            for kind, tensor in ({} if own is None else own.tensors).items():
                loop.load(tensor, kind=kind, own_steps=None if own is None else own.own_steps)
            size, first = config.inner.batch_size, OuterPlan(outer_of(config)).inner_step(checkpoint.meta.outer_step)
            batches = [self.samples[start : start + size] for start in range(0, len(self.samples), size)]
            losses = [loop.step(batch, first + number).loss for number, batch in enumerate(batches, 1)]
        finally:
            dist.destroy_process_group()
        return sum(losses) / len(losses)

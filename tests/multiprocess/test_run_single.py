# SPDX-License-Identifier: Apache-2.0
"""Peers that average after every inner step are one process with their common batch: real daemons, plain SGD.

The single process is one inner loop, built as a worker builds it, on all samples that the journal names for a step.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.optim.outer import ANCHOR
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
from isthmus.trainer.config.wiring import training_job
from isthmus.trainer.data.corpus import load_corpus
from isthmus.trainer.workers.inner_loop import InnerLoop
from tests.multiprocess.processes import Process
from tests.multiprocess.run_again import Account
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import running

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

_STEPS = 20
_AVERAGING = ("--outer.type", "diloco", "--outer.inner_steps", "1", "--outer.lr", "1", "--outer.momentum", "0")
_CLOSE = 1e-5
"""fp32: of losses, and of the way that the parameters have come."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_averaging_after_every_step_is_one_process_with_the_common_batch(
    tmp_path: Path, mesh: DeviceMesh, num_workers: int
) -> None:
    with running(tmp_path) as run:
        run.text.write_text(Path(argparse.__file__).read_text())
        flags = ("--inner.type", "sgd", "--inner.lr", "0.3", "--inner.grad_clip", "0", "--outer.codec", "raw")
        flags += (
            "--members.min_peers",
            "2",
            "--members.quorum",
            "1",
            "--members.grace",
            "1h",
            "--checkpoint.every",
            "1",
        )
        workers = ("--node.local-workers", str(num_workers))
        founder = run.found("--peers", "2", "--outer-steps", str(_STEPS), *_AVERAGING, *flags, *workers)
        run.wait_for_ticket()
        other = run.join(*workers)
        assert run.until_ended(founder, other) == [0, 0], run.story()
    assert len(assert_same_commits(founder, other)) == _STEPS
    account = Account.of(founder)
    losses, parameters = _single(account, mesh)
    told = [fmean(of_step) for of_step in zip(_losses(founder), _losses(other), strict=True)]
    assert told == pytest.approx(losses, rel=_CLOSE)
    assert losses[-1] < losses[0] - 0.5, "it learns"
    store = CheckpointStore(founder.directory / FOLDER_NAME, keep=1)
    begun = account.config.model.description().initial_parameters(account.config.run.seed)
    found = store.load(_STEPS).tensors[ANCHOR]
    assert float((found - parameters).norm()) < _CLOSE * float((parameters - begun).norm())


def _losses(process: Process) -> list[float]:
    """Of each step, as this peer wrote it down."""
    losses = {event["outer_step"]: event["loss"] for event in process.events("trained")}
    return [losses[step] for step in range(1, _STEPS + 1)]


def _single(account: Account, mesh: DeviceMesh) -> tuple[list[float], torch.Tensor]:
    """The loss of each step, and the parameters after the last, of one process."""
    config = account.config
    corpus = load_corpus(
        config.data.path,
        seq_len=account.seq_len,
        validation_fraction=config.data.validation_fraction,
        limit_nbytes=config.data.limit_nbytes,
    )
    loop = InnerLoop(training_job(config), mesh=mesh, train=corpus.train, validation=corpus.validation)
    parameters = config.model.description().initial_parameters(config.run.seed)
    loop.load(parameters)
    batches = zip(*(account.batches[peer] for peer in account.peers), strict=True)
    losses = [loop.step(sum(batch, ()), step).loss for step, batch in enumerate(batches, start=1)]
    loop.store(parameters)
    return losses, parameters

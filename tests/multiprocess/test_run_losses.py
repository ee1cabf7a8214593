# SPDX-License-Identifier: Apache-2.0
"""Every method in real daemons trains as in `optim.simulate`: the same samples, the same losses, the same state.

What a run of daemons has written down (journal, events, checkpoints, private state) is compared with the same run by
the simulator, which is told the settings and each peer's samples and nothing else (run_again.py).

The collective layer adds the parts of a mean up as they arrive. So with three peers methods of means are equal within
1e-5, and one of the peers has two workers. Some are equal bit by bit, and the digest of every commit with them, for no
sum of theirs has an order of its own: every payload goes to everybody, or to one peer; or two peers share a mean. There
each peer has one worker, since two add a gradient up otherwise than one does.

`scripts/methods` runs all. Otherwise a part is run, another one every day; MATRIX_DAY=n chooses. With `-s` each case
prints how far the two were apart.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.elastic.state.digest import Hasher
from isthmus.optim import outer_types
from isthmus.optim.eager import Eager
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import ANCHOR, PARAM, Tensors
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
from isthmus.trainer.engine.state_version import CHAIN
from isthmus.trainer.engine.worker_values import OWN_PARAMETERS
from scripts.bench_sizes import throttled
from tests.multiprocess.processes import Process
from tests.multiprocess.run_again import Account, Again, again
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import Run, running, todays

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

_PARTS = 9
"""Days until all have been run."""
_CLOSE = {"losses": 1e-5, "anchors": 1e-5, "other shared state": 1e-4, "own state": 1e-4}
"""What is no anchor is made of differences, in which what is alike cancels."""
_CLOSE_WITH_WEIGHTS = _CLOSE | {"anchors": 1e-4, "other shared state": 1e-3}
"""Products with weights that are no powers of two are rounded, and after a single inner step there is little else."""
_SAME = {"losses": 1e-14, "anchors": 0.0, "other shared state": 0.0, "own state": 0.0}
"""Losses of inner steps have the same bits; their sums are made in another order, in double precision."""
_LEAST_FALL = 0.1
_TEXT = Path(argparse.__file__)
_CALM = (
    *("--members.patience", "100", "--members.quorum", "1", "--members.grace", "1h"),
    *("--members.heartbeat_timeout", "60s", "--members.stall_timeout", "120s", "--members.reconnect_grace", "30s"),
)
"""Nobody is late or put out on a busy machine."""
_FRAGMENTS = ("--model.num-layers", "4")
_TWO_MOMENTS = (
    *("--outer.momentum-multiples", "[1, 2]", "--inner.type", "adopt"),
    *("--inner.betas", "[0.9, 0.99, 0.999]", "--inner.omegas", "[0.4, 0.6]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method, and how it is run."""

    method: str
    outer_steps: int
    flags: tuple[str, ...]
    num_peers: int = 3
    is_exact: bool = False
    """Whether no sum depends on the order in which parts arrive."""

    def __str__(self) -> str:
        return self.method + (f"-{self.num_peers}-peers" if self.num_peers != 3 else "")

    @property
    def workers_of_last(self) -> int:
        return 1 if self.is_exact else 2


def _steps(number: int, *more: str) -> tuple[str, ...]:
    return ("--outer.inner-steps", str(number), *more)


def _cases() -> Iterator[Case]:
    for method in ("diloco", "delayed", "eager", "co2"):
        yield Case(method=method, outer_steps=8, flags=_steps(4))
    for method in ("qsr", "autoloco"):
        yield Case(method=method, outer_steps=8, flags=_steps(3))
    for method in ("desloc", "local_adam"):
        yield Case(method=method, outer_steps=9, flags=_steps(3))
    yield Case(method="mtdao", outer_steps=9, flags=_steps(3, *_TWO_MOMENTS))
    yield Case(method="streaming", outer_steps=12, flags=_steps(6, *_FRAGMENTS, "--outer.num-fragments", "3"))
    yield Case(method="decoupled", outer_steps=18, flags=_steps(6, *_FRAGMENTS, "--outer.num-fragments", "6"))
    yield Case(method="edit", outer_steps=8, flags=_steps(4, *_FRAGMENTS))
    yield Case(method="powersgd", outer_steps=8, flags=_steps(4, "--outer.rank", "4", "--outer.dense-steps", "8"))
    yield Case(method="data_parallel", outer_steps=24, flags=("--outer.resync-steps", "8"))
    yield Case(method="sparseloco", outer_steps=8, flags=_steps(4, "--outer.dense-steps", "0"), is_exact=True)
    begins_dense = _steps(4, "--outer.dense-steps", "12")
    yield Case(method="sparseloco", outer_steps=8, flags=begins_dense, num_peers=2, is_exact=True)
    yield Case(method="noloco", outer_steps=8, flags=_steps(4), is_exact=True)
    # Polls come by the count of inner steps and find everybody at the same one: nothing depends on time in a calm run.
    yield Case(method="async", outer_steps=12, flags=_steps(4, "--outer.poll-steps", "2"), is_exact=True)
    # The mean of its parameters is one of equal numbers, which has no order.
    demo = ("--outer.resync-steps", "8", "--outer.warm-up-steps", "12", "--inner.type", "sgd")
    yield Case(method="demo", outer_steps=24, flags=demo, is_exact=True)
    yield Case(method="diloco", outer_steps=8, flags=_steps(4), num_peers=2, is_exact=True)


CASES = tuple(_cases())


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """Of one worker, which computes with as many threads as those of the daemons do."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    torch.set_num_threads(num_threads)


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    threads = Hasher(num_threads=1)
    yield threads
    threads.close()


def _trained(run: Run, case: Case, *, slowed: float = 0.0) -> list[Process]:
    """The run of daemons, from its first outer step to its last; the founder first.

    `slowed`: which part of the time the founder's worker has, from before the first outer step. Then each peer makes as
    many inner steps as fit.
    """
    run.text.write_text(_TEXT.read_text())
    flags = ("--outer.type", case.method, *case.flags, "--outer-steps", str(case.outer_steps))
    flags += ("--outer.codec", "raw", "--inner.lr", "0.005", "--checkpoint.every", "1", "--checkpoint.keep", "100")
    flags += ("--members.equal_steps", "false" if slowed else "true")
    founder = run.found("--peers", str(case.num_peers), "--members.min_peers", str(case.num_peers), *_CALM, *flags)
    run.wait_for_ticket()
    joined = [run.join() for _ in range(case.num_peers - 2)]
    with contextlib.ExitStack() as brakes:
        if slowed:
            run.until("the founder's workers", lambda: founder.events("workers") and founder.worker_pids())
            brakes.enter_context(throttled(founder.worker_pids(), slowed))
        joined.append(run.join("--node.local-workers", str(case.workers_of_last)))
        assert run.until_ended(founder, *joined) == [0] * case.num_peers, run.story()
    return [founder, *joined]


@pytest.mark.parametrize("case", todays(CASES, _PARTS), ids=str)
def test_daemons_train_as_the_simulation_does(tmp_path: Path, mesh: DeviceMesh, hasher: Hasher, case: Case) -> None:
    with running(tmp_path) as run:
        processes = {process.peer_id: process for process in _trained(run, case)}
    (founder, *_), digests = processes.values(), assert_same_commits(*processes.values())
    account = Account.of(founder)
    assert set(account.peers) == set(processes)
    expected = again(account, mesh, num_workers={list(processes)[-1]: case.workers_of_last})
    _assert_work_is_as_planned(account, expected)
    losses = {peer: _losses(process, case.outer_steps) for peer, process in processes.items()}
    private = {peer: account.private_of(process) for peer, process in processes.items()}
    apart = {
        "losses": _between_losses(losses, expected),
        "anchors": _between_states(founder, expected, anchors=True),
        "other shared state": _between_states(founder, expected, anchors=False),
        "own state": max(_between_own(private[peer], expected, peer) for peer in private),
    }
    print(f"{case}: " + ", ".join(f"{what} {distance:.1e}" for what, distance in apart.items()))
    assert account.begun.digest == expected.digest(0, hasher)
    limits = _SAME if case.is_exact else _CLOSE
    assert all(distance <= limits[what] for what, distance in apart.items()), apart
    if case.is_exact and not any(CHAIN in name for name in expected.tensors(0)):
        assert digests == {step: expected.digest(step, hasher).hex() for step in range(1, case.outer_steps + 1)}
    _assert_losses_fall(losses)


def test_peers_of_different_size_train_as_the_simulation_does(tmp_path: Path, mesh: DeviceMesh) -> None:
    case = Case(method="diloco", outer_steps=8, flags=_steps(8), num_peers=2, is_exact=True)
    with running(tmp_path) as run:
        processes = {process.peer_id: process for process in _trained(run, case, slowed=0.05)}
    (founder, *_), digests = processes.values(), assert_same_commits(*processes.values())
    assert len(digests) == case.outer_steps
    account = Account.of(founder)
    made = [account.inner_steps(step) for step in range(1, case.outer_steps + 1)]
    assert all(1 <= number <= 8 for of_step in made for number in of_step.values()), made
    assert set(made[0].values()) == {8}, "nothing is measured before the first round"
    # Which peer is the slow one depends on what else the machine does; tests/netns brakes one and looks at that one.
    assert any(len(set(of_step.values())) > 1 for of_step in made), made
    for step, of_step in enumerate(made, start=1):
        per_step = account.config.inner.batch_size * account.seq_len
        assert account.weights(step) == {peer: float(number * per_step) for peer, number in of_step.items()}
    expected = again(account, mesh, num_workers={})
    losses = {peer: _losses(process, case.outer_steps) for peer, process in processes.items()}
    apart = {
        "losses": _between_losses(losses, expected),
        "anchors": _between_states(founder, expected, anchors=True),
        "other shared state": _between_states(founder, expected, anchors=False),
    }
    print(f"different sizes: {made}, " + ", ".join(f"{what} {distance:.1e}" for what, distance in apart.items()))
    assert all(distance <= _CLOSE_WITH_WEIGHTS[what] for what, distance in apart.items()), apart
    _assert_losses_fall(losses)


def test_losses_are_compared_for_every_method() -> None:
    assert {case.method for case in CASES} == set(outer_types())


# ---------------------------------------------------------------------------------------------------------- comparisons


def _assert_work_is_as_planned(account: Account, expected: Again) -> None:
    """The journal has the samples and weights that the plan asks for: nobody was late, or left a step out."""
    plan, outer_steps = expected.plan, len(account.commits)
    batch = account.config.inner.batch_size * account.seq_len
    given_until: dict[FragmentKey, int] = {}
    for step in range(1, outer_steps + 1):
        rounds, until = plan.rounds(step), plan.inner_step(step)
        tokens = (until - plan.inner_step(step - 1)) * batch
        weight = float((until - given_until.get(rounds[0].fragment, 0)) * batch)
        given_until |= {round_.fragment: until for round_ in rounds}
        assert account.tokens(step) == dict.fromkeys(account.peers, tokens), f"outer step {step}"
        assert account.weights(step) == dict.fromkeys(account.peers, weight), f"outer step {step}"
    assert {len(batches) for batches in account.batches.values()} == {plan.inner_step(outer_steps)}


def _losses(process: Process, outer_steps: int) -> list[float | None]:
    """Of every outer step, as this peer wrote it down when it was committed."""
    losses: dict[int, float | None] = {event["outer_step"]: event["loss"] for event in process.events("trained")}
    assert sorted(losses) == list(range(1, outer_steps + 1))
    return [losses[step] for step in sorted(losses)]


def _assert_losses_fall(losses: Mapping[str, Sequence[float | None]]) -> None:
    """And differ between peers: where they are equal, peers have trained on the same samples."""
    steps = [[loss for loss in of_step if loss is not None] for of_step in zip(*losses.values(), strict=True)]
    steps = [of_step for of_step in steps if of_step]
    assert all(len(set(of_step)) == len(losses) for of_step in steps), steps
    assert fmean(itertools.chain(*steps[-2:])) < fmean(itertools.chain(*steps[:2])) - _LEAST_FALL, steps


def _between_losses(losses: Mapping[str, Sequence[float | None]], expected: Again) -> float:
    """The largest relative difference of any peer's loss in any outer step."""
    furthest = 0.0
    for peer, found in losses.items():
        for loss, other in zip(found, expected.losses[peer], strict=True):
            assert (loss is None) == (other is None)
            if loss is not None and other is not None:
                furthest = max(furthest, abs(loss - other) / other)
    return furthest


def _between_states(founder: Process, expected: Again, *, anchors: bool) -> float:
    """The largest distance of any shared tensor, as a part of its way, in any outer step with a checkpoint.

    There is always one of the last outer step. Chains are digests of what was exchanged: nothing to take a distance of.
    """
    store = CheckpointStore(founder.directory / FOLDER_NAME, keep=1)
    begun, furthest = expected.tensors(0), 0.0
    assert store.steps()[-1] == len(expected.states) - 1
    names = [name for name in begun if CHAIN not in name and name.endswith(ANCHOR) == anchors]
    for step in store.steps():
        found, others = store.load(step).tensors, expected.tensors(step)
        assert found.keys() == others.keys()
        furthest = max([furthest, *(_distance(found[name], others[name], begun[name]) for name in names)])
    last = expected.tensors(store.steps()[-1])
    assert not anchors or not any(torch.equal(last[name], begun[name]) for name in names)
    return furthest


def _between_own(found: Mapping[int, Tensors], expected: Again, peer: str) -> float:
    """The same of what a peer keeps for itself at the end, its parameters among it if nobody shares them."""
    states = expected.trajectory.states[peer]
    own = {place: states[part.key].private for place, part in enumerate(expected.fragments) if states[part.key].private}
    if not any(name.endswith(ANCHOR) for name in expected.tensors(0)):
        own[OWN_PARAMETERS] = {PARAM: expected.trajectory.values[peer]}
    assert found.keys() == own.keys()
    if isinstance(expected.outer, Eager):
        return 0.0  # after the last outer step the simulation has made a payload more
    furthest = 0.0
    for place, state in own.items():
        assert found[place].keys() == state.keys()
        for name, other in state.items():
            furthest = max(furthest, _distance(found[place][name], other, torch.zeros_like(other)))
    return furthest


def _distance(found: Tensor, expected: Tensor, begun: Tensor) -> float:
    """How far they are apart, as a part of the way from where they began."""
    apart, way = float((found - expected).norm()), float((expected - begun).norm())
    return apart / way if way else apart

# SPDX-License-Identifier: Apache-2.0
"""Every method of optim/ in real daemons, with every codec that it may have, through deaths, returns and lateness.

`scripts/methods` runs the whole matrix. Otherwise a part of it is run, another one every day; MATRIX_DAY=n chooses.
"""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from isthmus.optim import outer_types
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import Audit, assert_same_commits, read_journal
from tests.multiprocess.run_harness import OPEN_END, Run, running, todays

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

_PARTS = 9
"""Days until the whole matrix has been run."""
_FRAGMENTS = ("--model.num-layers", "4")
_TWO_MOMENTS = (
    *("--outer.momentum-multiples", "[1, 2]", "--inner.type", "adopt"),
    *("--inner.betas", "[0.9, 0.99, 0.999]", "--inner.omegas", "[0.4, 0.6]"),
)
_DENSE = ("raw", "bf16", "int8", "e3m0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One method with one codec."""

    method: str
    codec: str
    flags: tuple[str, ...] = ()
    guard: str = "none"
    first_steps: int = 6
    """Outer steps before anything happens."""

    def __str__(self) -> str:
        return f"{self.method}-{self.codec}" + (f"-{self.guard}" if self.guard != "none" else "")


def _cases() -> Iterator[Case]:
    steps = ("--outer.inner-steps", "6")
    layers = (*steps, *_FRAGMENTS)
    dense = ("--outer.dense-steps", "12")
    for codec in (*_DENSE, "twobit"):
        feedback = ("--outer.error-feedback", "true") if codec == "twobit" else ()
        thirds = (*layers, "--outer.num-fragments", "3", *feedback)
        yield Case(method="diloco", codec=codec, flags=(*steps, *feedback))
        yield Case(method="streaming", codec=codec, flags=thirds, first_steps=9)
    for codec in ("raw", "int8"):
        yield Case(method="edit", codec=codec, flags=layers)
        yield Case(method="decoupled", codec=codec, flags=(*layers, "--outer.num-fragments", "6"), first_steps=12)
        yield Case(method="delayed", codec=codec, flags=steps)
        yield Case(method="eager", codec=codec, flags=steps)
        yield Case(method="co2", codec=codec, flags=steps)
        yield Case(method="qsr", codec=codec, flags=steps)
        yield Case(method="autoloco", codec=codec, flags=steps)
        yield Case(method="powersgd", codec=codec, flags=(*steps, *dense, "--outer.rank", "4"))
        yield Case(method="desloc", codec=codec, flags=("--outer.inner-steps", "3"))
        yield Case(method="local_adam", codec=codec, flags=("--outer.inner-steps", "3"))
        yield Case(method="mtdao", codec=codec, flags=("--outer.inner-steps", "3", *_TWO_MOMENTS))
        yield Case(method="async", codec=codec, flags=("--outer.inner-steps", "6", "--outer.poll-steps", "3"))
    for codec in ("raw", "int8"):
        yield Case(method="sparseloco", codec=codec, flags=(*steps, *dense))
    for codec in ("raw", "bf16", "int8"):
        yield Case(method="noloco", codec=codec, flags=steps)
    means = ("--outer.resync-steps", "10")
    for codec in ("raw", "int8"):
        yield Case(method="data_parallel", codec=codec, flags=means, first_steps=25)
    yield Case(
        method="demo", codec="raw", flags=(*means, "--outer.warm-up-steps", "40", "--inner.type", "sgd"), first_steps=25
    )
    for guard in ("norm", "trimmed", "centred"):
        yield Case(method="diloco", codec="int8", flags=steps, guard=guard)


CASES = tuple(_cases())


def _leave_late(run: Run, late: Process, *others: Process) -> None:
    """A worker of this peer stands still until the others have gone on without it; then it comes along again."""
    worker = late.worker_pids()[0]
    os.kill(worker, signal.SIGSTOP)
    run.until("excuse", lambda: bool(late.events("excused")))
    gone_on_to = others[0].step + 2
    run.until_step(gone_on_to, *others)
    os.kill(worker, signal.SIGCONT)
    run.until("return", lambda: late.step >= gone_on_to)


@pytest.mark.parametrize("case", todays(CASES, _PARTS), ids=str)
def test_method_keeps_one_state_through_a_death_a_return_and_a_late_peer(tmp_path: Path, case: Case) -> None:
    with running(tmp_path) as run:
        flags = ["--outer.type", case.method, "--outer.codec", case.codec, "--outer.guard", case.guard, *case.flags]
        flags += ["--outer-steps", str(OPEN_END), "--inner.schedule.type", "constant"]
        flags += ["--checkpoint.every", "5", "--members.grace", "500ms"]
        founder = run.found("--peers", "3", *flags)
        run.wait_for_ticket()
        second, third = run.join("--node.local-workers", "2"), run.join()
        run.until_step(case.first_steps, founder, second, third)
        third.kill()
        num_joins = len(third.events("join"))
        run.until_step(founder.step + 3, founder, second)
        again = run.join(folder=third.directory)
        run.until("return", lambda: len(again.events("join")) > num_joins)
        run.until_step(founder.step + 3, founder, second, again)
        _leave_late(run, again, founder, second)
        run.until_step(founder.step + case.first_steps, founder, second, again)
        run.leave_all()
        audited = run.command("audit", "--json", *(str(item.directory) for item in (founder, second, again)))
        assert audited.code == 0, audited.out
        assert json.loads(audited.out)["holds"]
    assert_same_commits(founder, second, again)
    Audit.of(read_journal(founder.directory))  # nothing is consumed twice
    losses = [event["loss"] for event in founder.events("trained") if event["loss"] is not None]
    assert fmean(losses[-3:]) < fmean(losses[:2]), losses


def test_matrix_holds_every_method() -> None:
    assert {case.method for case in CASES} == set(outer_types())

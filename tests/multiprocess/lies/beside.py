# SPDX-License-Identifier: Apache-2.0
"""A run with three honest peers and a liar among them, and what must be true of it. Not tests."""

import math
import signal

from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run

DIVERGED, INTEGRITY = 8, 9
THREE = ("--members.start_peers", "3", "--run.outer_steps", str(OPEN_END))
SANE_LOSS = 2 * math.log(256)
"""Of bytes: twice what a model has that knows nothing."""


def three_honest_and(
    run: Run, kind: str, *flags: str, after: int = 0, liars: tuple[str, ...] = ()
) -> tuple[list[Process], Process]:
    """Three peers that are under way, and one that joins them with flags of its own, after so many of their steps."""
    founder = run.found("--peers", "3", "--outer-steps", str(OPEN_END), "--eval.every", "1", *flags)
    run.wait_for_ticket()
    honest = [founder, run.join(), run.join()]
    run.until_step(after, *honest)
    liar = run.join_as_liar(kind, *liars)
    run.until_step(1, *honest)
    return honest, liar


def coordinator_two_honest_and(run: Run, kind: str, *flags: str) -> tuple[Process, list[Process], Process]:
    """A coordinator of its own, two honest peers and one that lies. The first commit waits for the three."""
    coordinator = run.coordinator(*THREE, *flags)
    run.wait_for_ticket()
    return coordinator, [run.join(), run.join()], run.join_as_liar(kind)


def interrupt(run: Run, coordinator: Process, *peers: Process) -> None:
    """End them, the coordinator last."""
    for group in (peers, (coordinator,)):
        for process in group:
            process.signal(signal.SIGINT)
        run.until_ended(*group)


def assert_put_out(run: Run, honest: list[Process], liar: Process, *words: str) -> None:
    """The liar ends, told what it did; the coordinator has named it three times; the others' state is sane."""
    liar.is_judged = True
    outcome = liar.outcome()
    assert outcome.code == INTEGRITY, run.story()
    for word in (liar.peer_id, "3 times in a row", *words):
        assert word in outcome.sentences[-1]
    run.until_step(honest[0].step + 5, *honest)
    run.leave_all()
    founder = honest[0]
    assert len(founder.events("lied", of=liar.peer_id)) == 3
    assert {event["of"] for event in founder.events("lied")} == {liar.peer_id}
    assert f"member_lied of={liar.peer_id}" in founder.console.with_suffix(".err").read_text()
    losses = [event["loss"] for peer in honest for event in peer.events("evaluate")]
    assert losses
    assert max(losses) < SANE_LOSS
    assert_same_commits(*honest)


def causes_of(founder: Process) -> list[str]:
    """Of all its views."""
    return [event["cause"] for event in founder.events("view_decided")]


def put_out(founder: Process, peer: Process) -> list[str]:
    """Why it was dropped as one of the members that could not finish a round together."""
    return [cause for cause in causes_of(founder) if f"{peer.peer_id} dropped: members could not finish" in cause]


def plans_differed(founder: Process) -> list[str]:
    """Which of these say that members planned a round differently."""
    return [cause for cause in causes_of(founder) if "plan differently" in cause]

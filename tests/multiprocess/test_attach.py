# SPDX-License-Identifier: Apache-2.0
"""Training loops of people's own as members of a run: real programs, each with the daemon that it starts itself."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.multiprocess.attached import Mixer, digest_of
from tests.multiprocess.processes import LEFT, TIMEOUT_S, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import NEVER_LATE, OPEN_END, Run, running, todays

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EXAMPLE = (str(ROOT / "examples" / "attached_loop.py"),)
TRAINER = (str(ROOT / "examples" / "hf_trainer.py"),)
TINY = (str(Path(__file__).with_name("attached.py")),)
USAGE, WORKER_CRASHED = 2, 10
CHURNED = 38
"""Outer steps of a run in which a loop comes late."""


def _told(process: Process, pattern: str) -> list[tuple[str, ...]]:
    """What a loop has printed so far; a print of torchrun's processes and its line's end are two writes."""
    return re.findall(pattern, process.console.read_text(), re.MULTILINE)


def _ends(process: Process) -> str:
    """Digest of a loop's last parameters as a member."""
    (digest,) = set(_told(process, r"ends (?:with parameters )?([0-9a-f]{12})"))
    return digest


def _audit(run: Run, *processes: Process) -> None:
    audited = run.command("audit", "--json", *(str(process.directory) for process in processes))
    assert audited.code == 0, audited.out + audited.err
    assert json.loads(audited.out)["holds"]


def _assert_learns(process: Process) -> None:
    losses = [event["loss"] for event in process.events("trained") if event["loss"] is not None]
    assert losses[-1] < 0.8 * losses[0], losses


def _churned(run: Run, program: tuple[str, ...], *flags: str) -> None:
    """Two begin, a third comes late, one of the first two dies; the others go on to the end."""
    flags += ("--peers", "2", "--outer-steps", str(CHURNED), "--outer.inner-steps", "10")
    flags += (*NEVER_LATE, "--members.stall-timeout", "10min")
    founder = run.found_loop(*flags, program=program)
    run.wait_for_ticket()
    victim = run.join_loop(program=program)
    run.until_step(1, founder, victim)
    victim.signal(signal.SIGSTOP)  # the round waits, however long the late loop takes to load torch
    late = run.join_loop(program=program)
    run.until("its state", lambda: any(event["outer_step"] is not None for event in late.events("catch_up")))
    victim.signal(signal.SIGCONT)
    run.until("commit of the late one", lambda: late.step > 0)
    (daemon,) = victim.children()
    victim.kill()
    run.until("end of its daemon", lambda: daemon not in run.alive())
    assert run.until_ended(founder, late) == [0, 0], run.story()
    _audit(run, founder, victim, late)
    assert max(assert_same_commits(founder, victim, late)) == CHURNED
    assert _ends(founder) == _ends(late)
    assert late.step == founder.step == CHURNED
    assert victim.step < CHURNED
    _assert_learns(founder)


def test_loops_come_late_and_die_and_the_others_end_with_the_same_parameters(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        _churned(run, EXAMPLE)


def test_trainers_come_late_and_die_and_the_others_end_with_the_same_parameters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with running(tmp_path) as run:
        _churned(run, TRAINER)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_a_model_that_fsdp_has_cut_over_two_processes_is_one_peers(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", "6", "--outer.inner-steps", "5", "--inner.batch-size", "8")
        founder = run.found_loop(*flags, "--outer.type", "desloc", program=(*TORCHRUN, *TINY))
        run.wait_for_ticket()
        other = run.join_loop(program=TINY)
        assert run.until_ended(founder, other) == [0, 0], run.story()
    assert max(assert_same_commits(founder, other)) == 6
    assert len(_told(founder, "^ends [0-9a-f]{12}$")) == 2
    assert _ends(founder)  # the same on both processes
    assert set(_told(founder, "^at 1 ([0-9a-f]{12})$")) == set(_told(other, "^at 1 ([0-9a-f]{12})$"))
    _assert_learns(founder)


def test_two_processes_of_torchrun_are_one_peer(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", "5", "--outer.inner-steps", "10")
        founder = run.found_loop(*flags, program=(*TORCHRUN, *EXAMPLE))
        run.wait_for_ticket()
        other = run.join_loop(program=EXAMPLE)
        assert run.until_ended(founder, other) == [0, 0], run.story()
    assert max(assert_same_commits(founder, other)) == 5
    begins = _told(founder, "process (.): begins with parameters ([0-9a-f]{12})")
    assert sorted(rank for rank, _ in begins) == ["0", "1"]
    assert {digest for _, digest in begins} == set(_told(other, "begins with parameters ([0-9a-f]{12})"))
    assert len(_told(founder, "ends with")) == 2
    assert _ends(founder) == _ends(other)
    _assert_learns(founder)


def test_a_late_loop_begins_with_the_runs_parameters_leaves_in_order_and_goes_on_alone(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found_loop("--outer-steps", str(OPEN_END), "--outer.inner-steps", "5", program=TINY)
        run.wait_for_ticket()
        run.until_step(2, founder)
        late = run.join_loop(program=TINY)
        run.until("commit of the late one", lambda: late.step > 2)
        assert run.command("leave", "--dir", str(late.directory)).code == 0
        assert run.until_ended(late) == [0]
        assert late.events("leave", code=LEFT)
        assert _told(late, "^own (.)$") == ["0", "1"]
        after = founder.step
        run.until_step(after + 3, founder)
        founder.signal(signal.SIGINT)
        assert founder.outcome().code == -signal.SIGINT
        assert not run.alive()
    assert_same_commits(founder, late)
    (step, digest), *_ = _told(late, "^at ([0-9]+) ([0-9a-f]{12})$")
    assert int(step) > 1  # of the run's, for a schedule
    assert digest in {theirs for _, theirs in _told(founder, "^at ([0-9]+) ([0-9a-f]{12})$")}


def test_a_loop_that_stands_still_is_left_behind(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--outer.inner-steps", "5", "--members.grace", "500ms")
        founder = run.found_loop(*flags, program=TINY)
        run.wait_for_ticket()
        still = run.join_loop(program=(*TINY, "--stand-still-at", "12"))
        run.until("excuse", lambda: bool(still.events("excused")))
        gone_on_to = founder.step + 3
        run.until_step(gone_on_to, founder)
        assert still.is_running
        still.kill()
        run.until_step(founder.step + 3, founder)
        assert run.command("leave", "--dir", str(founder.directory)).code == 0
        assert run.until_ended(founder) == [0]
    assert_same_commits(founder, still)


def test_loops_that_are_started_again_go_on_with_their_run(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--outer.inner-steps", "5", "--checkpoint.every", "4")
        founder = run.found_loop(*flags, program=TINY)
        run.wait_for_ticket()
        other = run.join_loop(program=TINY)
        run.until_step(6, founder, other)
        for process in (founder, other):
            process.kill()
        run.until("end of the daemons", lambda: not run.alive())
        stood, num_before = founder.step, len(other.events("join"))
        founder = run.found_loop(*flags, program=TINY, folder=founder.directory)
        other = run.loop("join", program=TINY, folder=other.directory)
        run.until("return", lambda: len(other.events("join")) > num_before)
        run.until_step(max(stood, founder.step) + 3, founder, other)
        for process in (other, founder):
            assert run.command("leave", "--dir", str(process.directory)).code == 0
        assert run.until_ended(other, founder) == [0, 0], run.story()
        _audit(run, founder, other)
    assert_same_commits(founder, other)


def test_a_founders_loop_that_is_killed_takes_its_coordinator_along_and_is_started_again(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--outer.inner-steps", "5")
        founder = run.found_loop(*flags, program=TINY)
        run.wait_for_ticket()
        other = run.join_loop(program=TINY)
        run.until_step(2, founder, other)
        _kill_with_daemon(run, founder)  # found before: the daemon coordinated on, and kept the folder
        stood = founder.step
        founder = run.found_loop(*flags, program=TINY, folder=founder.directory)
        run.until_step(stood + 3, founder, other)
        assert other.is_running
        assert run.command("leave", "--dir", str(founder.directory)).code == 0
        run.until("its leave", lambda: bool(founder.events("leave", code=LEFT)))
        after = other.step
        run.until_step(after + 3, other)
        _kill_with_daemon(run, founder)  # its loop has waited for the others
        other.kill()
    assert_same_commits(founder, other)


def test_a_founders_loop_that_ends_before_its_run_leaves_the_coordinator_to_the_others(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--min-peers", "2", "--outer-steps", "8", "--outer.inner-steps", "5")
        founder = run.found_loop(*flags, program=(*TINY, "--end-at", "12"))
        run.wait_for_ticket()
        (daemon,) = founder.children()
        other = run.join_loop(program=TINY)
        assert run.until_ended(founder) == [0]
        assert _told(founder, "^own (.)$") == ["0", "1"]
        run.until("goodbye", lambda: bool(founder.events("leave", code=LEFT)))
        assert daemon in run.alive()  # found before: it ended with its loop, and the others with code 4
        run.until("log of its own", lambda: _output_of(daemon) == {founder.directory / "daemon.log"})
        late = run.join_loop(program=TINY)  # by then the other one waits for a second peer
        assert run.until_ended(other, late) == [0, 0], run.story()
        run.until("end of the daemon", lambda: daemon not in run.alive())
        _audit(run, founder, other, late)
    assert not founder.events("failed")
    assert set(assert_same_commits(founder, other, late)) == set(range(1, 9))
    assert _ends(other) == _ends(late)
    (said,) = [line for line in founder.outcome().err.splitlines() if line.startswith("isthmus: ")]
    assert f"left at outer step {founder.step}" in said
    assert f"process {daemon} coordinates the others" in said
    assert said.endswith(f"isthmus leave --now --dir {founder.directory.name} ends it")


def _output_of(pid: int) -> set[Path]:
    """Where a process writes what it says."""
    return {Path(f"/proc/{pid}/fd/{descriptor}").readlink() for descriptor in (1, 2)}


def _kill_with_daemon(run: Run, process: Process) -> None:
    (daemon,) = process.children()
    process.kill()
    run.until("end of its daemon", lambda: daemon not in run.alive())


def test_a_loop_whose_values_are_no_numbers_ends_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        flags = ("--peers", "2", "--outer-steps", str(OPEN_END), "--outer.inner-steps", "5")
        founder = run.found_loop(*flags, program=(*TINY, "--nan-at", "7"))
        run.wait_for_ticket()
        well = run.join_loop(program=TINY)
        run.until_step(1, founder, well)
        error = _ended_badly(founder, WORKER_CRASHED, "up")  # found before: it stood in its step
        assert "param/0 are not finite" in error.splitlines()[-1]
        assert "values_not_finite" not in error  # nobody begins anew
        after = well.step
        run.until_step(after + 3, well)
        sick = run.join_loop(program=(*TINY, "--nan-at", "1"))
        error = _ended_badly(sick, WORKER_CRASHED)
        said = [line for line in error.splitlines() if line.startswith("isthmus: ")]  # found before: "isthmus: None"
        assert "the values of fragment param/0 are not finite" in said[-1]
        assert "start the loop again" in said[-1]
        run.until_step(well.step + 3, well)
        assert run.command("leave", "--dir", str(well.directory)).code == 0
        assert run.until_ended(well) == [0]
        run.until("end of the coordinator", lambda: not run.alive())
    assert_same_commits(founder, well)


def test_who_does_not_fit_a_run_of_loops_is_told_why(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        right = (*TINY, "--tokens-per-sample", "1000")
        founder = run.found_loop("--peers", "2", "--outer-steps", "2", "--outer.inner-steps", "2", program=right)
        run.wait_for_ticket()
        lighter = run.join_loop(program=TINY)
        wider = run.join_loop(program=(*TINY, "--dim", "16"))
        heavier = run.join_loop(program=(*TINY, "--optimizer", "sgd"))
        alone = run.join()
        error = _ended_badly(lighter, USAGE)  # found before: it weighed a thousandth of the founder in silence
        assert "isthmus: a sample of this loop counts for 1 token, in the run for 1000" in error
        assert "tokens_per_sample=1000" in error
        error = _ended_badly(wider, USAGE)
        assert (
            "isthmus: the loop's model is not the run's: here layers.0.weight 16x16, in the run layers.0.weight 12x12"
            in error
        )
        error = _ended_badly(heavier, USAGE)
        assert "optimizer keeps momentum_buffer for each parameter, in the run it is exp_avg, exp_avg_sq" in error
        (sentence,) = (outcome := alone.outcome()).sentences
        assert outcome.code == USAGE
        assert "this run's peers train by loops of their own" in sentence
        assert "isthmus.attach" in sentence
        line = next(line for line in founder.console.read_text().splitlines() if "ISTHMUS_COMMAND" in line)
        assert (
            line.strip()
            == f"ISTHMUS_COMMAND='isthmus join {run.ticket.read_text().strip()}' python {shlex.join(right)}"
        )
        assert line in run.command("ticket", "--dir", str(founder.directory)).out
        member = run.join_loop(program=right)
        assert run.until_ended(founder, member) == [0, 0], run.story()


def test_a_loop_does_not_get_into_a_run_of_isthmus_own_model(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.coordinator()
        run.wait_for_ticket()
        error = _ended_badly(run.join_loop(program=TINY), USAGE)
        assert "isthmus: this run trains isthmus's own model" in error


def _ended_badly(process: Process, code: int, command: str = "join", *, timeout_s: float = TIMEOUT_S) -> str:
    """What a loop wrote on stderr whose daemon gave up with this code."""
    outcome = process.outcome(timeout_s=timeout_s)
    assert outcome.code == 1
    last = outcome.err.splitlines()[-1]
    ended = f"RunEnded: isthmus {command} ended with code {code}; the line that it printed last says why"
    lives_on = f"(isthmus {command} coordinates for as long as others are there, or until isthmus leave)"
    assert last.endswith(ended if command == "join" else lives_on)
    return outcome.err


def test_the_model_of_a_run_of_loops_is_exported_by_name(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        founder = run.found_loop("--outer-steps", "2", "--outer.inner-steps", "3", program=TINY)
        assert run.until_ended(founder) == [0], run.story()
        done = run.command("export", "--dir", str(founder.directory), "--out", "model")
        assert done.code == 0, done.err
    model = Mixer(12)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    assert not model.load_state_dict(load_file(file), strict=False).unexpected_keys
    assert digest_of(model) == _ends(founder)


METHODS = (
    pytest.param(("--outer.inner-steps", "6"), TINY, id="diloco"),
    pytest.param(
        ("--outer.type", "streaming", "--outer.num-fragments", "3", "--outer.inner-steps", "6"), TINY, id="streaming"
    ),
    pytest.param(("--outer.type", "desloc", "--outer.inner-steps", "3"), TINY, id="desloc"),
    pytest.param(("--outer.type", "data_parallel"), TINY, id="data_parallel"),
    pytest.param(("--outer.type", "noloco", "--outer.inner-steps", "6"), TINY, id="noloco"),
    pytest.param(("--outer.inner-steps", "6"), (*TINY, "--optimizer", "sgd"), id="diloco-sgd"),
)


@pytest.mark.parametrize(("flags", "program"), todays(METHODS, 3))
def test_loops_are_members_with_every_kind_of_method(
    tmp_path: Path, flags: tuple[str, ...], program: tuple[str, ...]
) -> None:
    with running(tmp_path) as run:
        founder = run.found_loop(
            "--peers", "2", "--outer-steps", "12", "--inner.batch-size", "8", *flags, program=program
        )
        run.wait_for_ticket()
        other = run.join_loop(program=program)
        assert run.until_ended(founder, other) == [0, 0], run.story()
    assert set(assert_same_commits(founder, other)) == set(range(1, 13))
    begins = [_told(process, "^at ([0-9]+) ([0-9a-f]{12})$")[0] for process in (founder, other)]
    assert begins[0] == begins[1]
    assert _told(founder, "^own (.)$") == ["0", "1"]
    _assert_learns(founder)

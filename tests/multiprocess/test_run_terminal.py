# SPDX-License-Identifier: Apache-2.0
"""What a peer shows on a terminal and in a pipe, and that no reader of either can end or hold up its run."""

import fcntl
import os
import re
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_harness import Run, running
from tests.unit.trainer.screen import COLUMNS, Screen

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

STEPS = 40
PIPE_NBYTES = 4096
_LIVE = re.compile(r"step \d+/40, round \d/3, loss \d\.\d{3}, \S+ tok/s, \d peers?, \d:\d\d left")


def _up(run: Run, *flags: str, out: int | None = None, err: int | None = None) -> Process:
    mine = ("-c", str(run.config), "--data", str(run.text), "--outer-steps", str(STEPS), "--ticket-file")
    return run.start("up", *mine, str(run.ticket), *flags, terminal=out, errors=err)


def test_on_a_terminal_one_live_line_stays_below_the_log_and_the_ticket_is_whole(tmp_path: Path) -> None:
    with running(tmp_path, TERM="xterm") as run:
        founders, joiners = Screen(), Screen()
        founder = _up(run, "--peers", "2", out=founders.terminal, err=founders.terminal)
        run.wait_for_ticket()
        flags = ("--node.threads", "1")
        joiner = run.start("join", f"@{run.ticket}", *flags, terminal=joiners.terminal, errors=joiners.terminal)
        assert run.until_ended(founder, joiner) == [0, 0]
        ticket = run.ticket.read_text().strip()
    for screen in (founders, joiners):
        screen.close()
        live = [line for line in screen.drawn if line]
        assert max(map(len, live)) < COLUMNS
        assert any(_LIVE.fullmatch(line) for line in live), live
        stays = screen.lines
        assert not any(_LIVE.search(line) for line in stays)
        log = [line for line in stays if re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line)]
        assert sum(" committed outer_step=" in line for line in log) >= STEPS - 1
        (first,) = (number for number, line in enumerate(stays) if line.startswith("run run-"))
        assert stays[first].endswith(" is complete")
        assert [line.split()[0] for line in stays[first + 1 :] if line] == [
            "steps", "loss", "tokens", "peers", "checkpoint", "next:",
        ]  # fmt: skip
    assert f"    isthmus join {ticket}" in founders.lines


def test_in_a_pipe_there_are_plain_lines_and_a_result_on_stdout(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        ended = _up(run).outcome()
        assert ended.code == 0
        assert not re.search(r"[\r\x1b]", ended.out + ended.err)
        assert ended.sentences == []
        assert ended.out.startswith("others join with (until ")
        assert ended.out.splitlines()[-1].startswith("next: isthmus export --dir ")


@pytest.mark.parametrize("how", ["full", "no reader", "closed", "no room"])
def test_a_stdout_and_stderr_that_take_nothing_do_not_hold_a_run_up(tmp_path: Path, how: str) -> None:
    with running(tmp_path) as run:
        if how == "closed":
            closing = ("sh", "-c", 'exec "$0" "$@" >&- 2>&-')
            flags = ("-c", str(run.config), "--data", str(run.text), "--outer-steps", str(STEPS))
            founder = run.start("up", *flags, inside=closing)
        elif how == "no room":
            bad = os.open("/dev/full", os.O_WRONLY)
            founder = _up(run, out=bad, err=bad)
            os.close(bad)
        else:
            reading, writing = os.pipe()
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
            founder = _up(run, "--verbose", out=writing, err=writing)
            os.close(writing)
            if how == "no reader":
                os.close(reading)
        assert run.until_ended(founder) == [0]
        assert founder.step == STEPS

# SPDX-License-Identifier: Apache-2.0
"""Whoever logs never waits for who reads; a live line stays the last one, and only a terminal has one."""

import fcntl
import os
import time
from collections.abc import Callable

import pytest

from isthmus.trainer.cli.console import Console
from tests.unit.trainer.screen import COLUMNS, Screen

PIPE_NBYTES = 4096


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pipe() -> "tuple[int, int]":
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
    return reading, writing


def test_a_pipe_gets_plain_lines_and_no_live_line(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    results, for_results = os.pipe()
    with Console(out=for_results, err=writing) as console:
        console.watch(lambda: "alive")
        console.log("first\nsecond")
        console.result("result")
        console.log("θ third")
    os.close(writing)
    os.close(for_results)
    assert os.read(reading, PIPE_NBYTES).decode() == "first\nsecond\nθ third\n"
    assert os.read(results, PIPE_NBYTES) == b"result\n"


def test_on_a_terminal_the_live_line_stays_below_what_scrolls_never_wraps_and_goes_at_the_end() -> None:
    screen = Screen()
    says = "one"
    with Console(out=screen.terminal, err=screen.terminal) as console:
        console.watch(lambda: says)
        until(lambda: screen.lines == ["one"])
        console.log("logged")
        console.result("result " + "x" * COLUMNS)
        until(lambda: screen.lines == ["logged", "result " + "x" * COLUMNS, "one"])
        says = "long " * COLUMNS
        until(lambda: len(screen.lines[-1]) == COLUMNS - 1)
        says = "short"
        until(lambda: screen.lines[-1] == "short")
    until(lambda: screen.lines == ["logged", "result " + "x" * COLUMNS, ""])
    screen.close()
    assert max(map(len, screen.drawn)) < COLUMNS


def test_a_live_line_that_does_not_change_is_not_drawn_again() -> None:
    screen = Screen()
    asked = []
    with Console(out=screen.terminal, err=screen.terminal) as console:
        console.watch(lambda: str(asked.append(1) or "same"))
        until(lambda: len(asked) > 3)
        assert screen.text == "same"
    screen.close()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with Console(out=screen.terminal, err=screen.terminal) as console:
        console.watch(lambda: "alive")
        console.log("logged")
    screen.close()
    assert screen.text == "logged\r\n"


def test_who_logs_does_not_wait_for_a_reader_that_does_not_read_and_the_loss_is_told(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    console = Console(err=writing)
    began = time.monotonic()
    for number in range(5000):
        console.log(f"line {number} " + "x" * 80)
    assert time.monotonic() - began < 5
    got, written, lost = b"", 0, 0
    while written + lost < 5000:
        got += os.read(reading, PIPE_NBYTES)
        whole = got.decode().splitlines() if got.endswith(b"\n") else []
        told = [int(line.split()[0]) for line in whole if line.endswith(" log lines were not written")]
        written, lost = len(whole) - len(told), sum(told)
    console.close()
    assert got.startswith(b"line 0 " + b"x" * 80 + b"\nline 1 ")
    assert lost > 0


def test_the_end_does_not_wait_for_ever_for_a_reader_that_does_not_read(pipe: tuple[int, int]) -> None:
    console = Console(err=pipe[1])
    for _ in range(100):
        console.log("x" * 80)
    began = time.monotonic()
    console.close()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["no reader", "no room", "closed"])
def test_what_cannot_be_written_harms_nothing_else(pipe: tuple[int, int], how: str) -> None:
    results, for_results = os.pipe()
    bad = {"no reader": pipe[1], "no room": os.open("/dev/full", os.O_WRONLY), "closed": os.dup(pipe[1])}[how]
    if how == "closed":
        os.close(bad)
    os.close(pipe[0])
    with Console(out=for_results, err=bad) as console:
        for number in range(3):
            console.log("lost")
            console.result(str(number))
    os.close(for_results)
    assert os.read(results, PIPE_NBYTES) == b"0\n1\n2\n"

# SPDX-License-Identifier: Apache-2.0
"""Workers of several peers on one machine divide its processors, as long as each of them lives."""

import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import torch

from isthmus.trainer.workers import neighbours
from isthmus.trainer.workers.neighbours import Neighbours, SharedThreads

OTHER = """
import sys
from isthmus.trainer.workers.neighbours import Neighbours
own = Neighbours(sys.argv[1])
print(own.count(), flush=True)
sys.stdin.read()
own.close()
"""


class Other:
    """A worker of another peer: a process of its own."""

    def __init__(self, group: str) -> None:
        command = [sys.executable, "-c", OTHER, group]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.counted = int(self.popen.stdout.readline())

    def ends(self) -> None:
        self.popen.communicate()

    def is_killed(self) -> None:
        self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def group() -> Iterator[str]:
    """Workers that only this test knows; and torch has its threads again afterwards."""
    before = torch.get_num_threads()
    yield uuid.uuid4().hex
    torch.set_num_threads(before)


def test_whoever_lives_is_counted_and_nobody_else(group: str) -> None:
    own, stranger = Neighbours(group), Neighbours(uuid.uuid4().hex)
    assert own.count() == 1
    second, third = Other(group), Other(group)
    assert (second.counted, third.counted) == (2, 3)
    assert own.count() == 3
    second.ends()
    assert own.count() == 2
    third.is_killed()
    assert own.count() == 1
    own.close()
    stranger.close()
    assert own.count() == 1


def test_threads_are_a_part_of_the_machine_while_others_are_there(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_LOOK_S", 0.0)
    with SharedThreads(4, Neighbours(group), num_processors=5) as threads:
        assert torch.get_num_threads() == 4
        second = Other(group)
        threads.look()
        assert torch.get_num_threads() == 2
        third = Other(group)
        threads.look()
        assert torch.get_num_threads() == 1, "three on five processors"
        second.is_killed()
        third.is_killed()
        threads.look()
        assert torch.get_num_threads() == 4


def test_whoever_was_given_few_threads_gets_no_more_and_a_given_number_is_not_divided(group: str) -> None:
    with SharedThreads(1, Neighbours(group), num_processors=64):
        assert torch.get_num_threads() == 1
        with SharedThreads(3, None, num_processors=2) as given:
            given.look()
            assert torch.get_num_threads() == 3


def test_where_the_list_of_sockets_cannot_be_read_a_worker_counts_itself(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_SOCKETS", neighbours.Path("/proc/net/there-is-no-such-list"))
    own = Neighbours(group)
    assert own.count() == 1
    own.close()

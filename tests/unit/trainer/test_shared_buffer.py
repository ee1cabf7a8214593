# SPDX-License-Identifier: Apache-2.0
"""Memory without a name that processes share."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.workers.shared_buffer import MAILBOX, SharedBuffer, SharedTokens


def test_two_maps_of_one_descriptor_show_the_same_memory() -> None:
    ours = SharedBuffer.create(1000)
    assert torch.equal(ours.tensor, torch.zeros(1000))
    theirs = SharedBuffer(os.dup(ours.fd), 1000)
    ours.tensor[17] = 3.5
    theirs.tensor[999] = -1.0
    assert (theirs.tensor[17].item(), ours.tensor[999].item()) == (3.5, -1.0)
    ours.close()
    theirs.close()


def test_each_place_of_a_buffer_is_memory_of_its_own_on_whole_pages() -> None:
    ours = SharedBuffer.create(1000)
    theirs = SharedBuffer(os.dup(ours.fd), 1000)
    assert ours.at(MAILBOX) is ours.tensor
    assert all(ours.at(1 + number) is anchor for number, anchor in enumerate(ours.anchors))
    for number, place in enumerate(ours.places):
        place.fill_(float(number))
    for number, place in enumerate(theirs.places):
        assert place.tolist() == [float(number)] * 1000
        assert place.data_ptr() % 4096 == 0
    ours.close()
    theirs.close()


def test_a_view_outlives_the_buffer_it_shows() -> None:
    buffer = SharedBuffer.create(100)
    view = buffer.tensor[50:60]
    view.fill_(2.0)
    buffer.close()
    buffer.close()
    assert view.sum().item() == 20.0


def test_a_buffer_has_no_name_and_is_not_inherited_unasked() -> None:
    buffer = SharedBuffer.create(10)
    assert os.fstat(buffer.fd).st_nlink == 0
    assert not os.get_inheritable(buffer.fd)
    buffer.close()


def test_nobody_can_shrink_a_buffer_under_its_readers() -> None:
    buffer = SharedBuffer.create(10)
    with pytest.raises(PermissionError):
        os.ftruncate(buffer.fd, 0)
    buffer.close()


def test_a_buffer_that_is_larger_than_its_file_is_refused() -> None:
    buffer = SharedBuffer.create(10)
    with pytest.raises(ValueError, match="mmap length is greater"):
        SharedBuffer(buffer.fd, 2000)
    with pytest.raises(ValueError, match="at least one element"):
        SharedBuffer(buffer.fd, 0)
    buffer.close()


def test_more_memory_than_the_machine_has_is_refused_at_once() -> None:
    with pytest.raises(EnvironmentFault, match="this machine has"):
        SharedBuffer.create(1 << 60)


def test_tokens_in_memory_are_shared_by_a_copy() -> None:
    shared = SharedTokens.share(np.arange(200, dtype=np.uint8)[20:70])
    tokens = shared.tokens()
    shared.close()
    shared.close()
    np.testing.assert_array_equal(tokens, np.arange(20, 70))
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("start", [0, 1, 4096, 5000])
def test_a_slice_of_a_mapped_file_is_shared_by_that_file(start: int, tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8)
    path = tmp_path / "text"
    path.write_bytes(content.tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=100)
    shared = SharedTokens.share(mapped[start:][:3000])
    assert os.fstat(shared.fd).st_ino == path.stat().st_ino
    np.testing.assert_array_equal(shared.tokens(), content[100 + start :][:3000])
    shared.close()


def test_no_tokens_are_shared_as_none() -> None:
    shared = SharedTokens.share(np.empty(0, dtype=np.uint8))
    assert len(shared.tokens()) == 0
    shared.close()

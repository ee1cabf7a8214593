# SPDX-License-Identifier: Apache-2.0
"""A small run of scripts/fuzz_frames.py: whatever arrives, only RemoteProtocolError comes of it, and life goes on."""

from scripts.fuzz_frames import fuzz


def test_five_thousand_mutated_frames_raise_nothing_else_and_leave_a_communicator_of_use():
    outcomes = fuzz(5_000, seed=7)
    # Both must happen, or the frames are turned away at the door and nothing behind it is tried.
    assert outcomes["finished"] > 10
    assert outcomes["connection closed"] > 100

# SPDX-License-Identifier: Apache-2.0
"""One decision for every frame: of the past, of now, or of the future."""

import pytest

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, View

ALICE = PeerId("a" * 16)
BOB = PeerId("b" * 16)
VIEW = View(Epoch(5), OuterStep(3), b"", (Member(ALICE, Incarnation(2), "h:1"),))


@pytest.mark.parametrize(
    ("peer_id", "incarnation", "epoch", "standing"),
    [
        (ALICE, 2, 5, Standing.CURRENT),
        (ALICE, 2, 4, Standing.STALE),
        (ALICE, 2, 6, Standing.FUTURE),
        (ALICE, 1, 5, Standing.STALE),
        (ALICE, 1, 6, Standing.STALE),
        (ALICE, 3, 5, Standing.STALE),
        (ALICE, 3, 6, Standing.FUTURE),
        (BOB, 1, 5, Standing.STALE),
        (BOB, 1, 6, Standing.FUTURE),
    ],
)
def test_only_this_start_of_a_member_is_current(peer_id, incarnation, epoch, standing):
    assert Fence.of(VIEW).judge(PeerRef(peer_id, Incarnation(incarnation)), Epoch(epoch)) is standing


def test_before_any_view_everything_is_of_the_future():
    assert Fence.before_any_view().judge(PeerRef(ALICE, Incarnation(1)), Epoch(0)) is Standing.FUTURE

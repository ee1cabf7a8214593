# SPDX-License-Identifier: Apache-2.0
"""The small frames of a round: whatever is in them, others can read them."""

import msgspec
import pytest

from isthmus.collective.core.types import RoundKey
from isthmus.collective.errors import OperationAborted, RemoteProtocolError
from isthmus.collective.rounds.notices import AbortNotice, Mismatch, abort_payload_of, mismatch_heard
from isthmus.collective.rounds.plan import Terms
from isthmus.collective.transport.hello import decode
from isthmus.collective.transport.wire import FrameType, Header, on_bulk, pack, unpack

ME = f"{0:016x}"


@pytest.mark.parametrize("num_suspects", [0, 1, 200, 1023])
@pytest.mark.parametrize("cause", ["not finished in 1800 s", "\N{SNOWMAN}" * 600])
def test_a_round_that_is_given_up_because_of_very_many_can_be_told(num_suspects, cause):
    # Found before: of 240 suspects on the frame was too long, and broke the links with all who were to hear of it.
    suspects = tuple(f"{number:016x}" for number in range(1, num_suspects + 1))
    payload = abort_payload_of(OperationAborted(RoundKey(1, 2, 0), cause, suspects), ME)
    unpack(pack(Header(type=FrameType.ABORT, payload_nbytes=len(payload)), payload), on_bulk(1 << 20))
    heard = decode(payload, AbortNotice).suspects
    assert heard == suspects[: len(heard)]
    assert len(heard) >= min(num_suspects, 60)


def test_what_a_member_says_of_a_third_ones_terms_is_its_own_word_and_of_its_own_terms_is_a_finding():
    terms = Terms(**dict.fromkeys(Terms.__struct_fields__, "same"))
    of_a_third = mismatch_heard(Mismatch("plan", "same", "other", "third"), terms, "sender")
    assert (of_a_third.peer_id, of_a_third.told_by) == ("third", "sender")
    of_itself = mismatch_heard(Mismatch("plan", "other", "same", ME), terms, "sender")
    assert (of_itself.peer_id, of_itself.told_by) == ("sender", None)


def test_more_suspects_than_a_view_can_have_are_no_notice():
    # Found before: they went on to the coordinator, which refused the word of everybody who had heard them.
    payload = msgspec.msgpack.encode({"cause": "cause", "suspects": ("",) * 1025})
    with pytest.raises(RemoteProtocolError):
        decode(payload, AbortNotice)

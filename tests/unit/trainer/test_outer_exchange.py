# SPDX-License-Identifier: Apache-2.0
"""One round on real communicators: what arrives, when it counts, and that it ends."""

import dataclasses
import threading
import time

import pytest
import torch

from isthmus.collective import OperationAborted, PlanMismatch
from isthmus.collective.api.standalone import peer_id_of
from isthmus.collective.codec import codec_named
from isthmus.optim.fragments import FragmentKey
from isthmus.optim.outer import Emitted, Op, Round
from isthmus.optim.workload import draw_pairs
from isthmus.trainer import outer_exchange
from isthmus.trainer.outer_exchange import Exchanger
from isthmus.trainer.outer_votes import History, Settled, Vote
from tests.unit.trainer.outer_rig import communicators, install, through, together

KEY = FragmentKey(kind="param", index=0)
MEAN = Round(fragment=KEY, op=Op.MEAN, inner_step=1)
GATHER = dataclasses.replace(MEAN, op=Op.GATHER)
PAIR = dataclasses.replace(MEAN, op=Op.PAIR)
DEADLINE_S = 15.0
"""Of what should take milliseconds, on a machine that may be busy."""


@pytest.fixture
def three():
    with communicators(3) as opened:
        yield opened


def payload(rank, numel=10):
    return torch.sin(torch.arange(numel) * (rank + 1.0))


def exchanged(opened, round_of, *, weights=(1.0, 1.0, 1.0), notes=(), numel=10, place=0):
    """(result, settled, contribution) of every member."""

    def work(rank, communicator):
        round_ = round_of(rank) if callable(round_of) else round_of
        exchanger = Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S)
        emitted = Emitted(payload=payload(rank, numel), notes=tuple(note + rank for note in notes))
        exchange = exchanger.start(round_, place, emitted, weights[rank], History())
        settled = exchange.settle()
        contribution = exchange.contribution(None)
        result = exchange.result(settled.votes) if settled.counts else None
        return result, settled, contribution

    return together(opened, work)


# ------------------------------------------------------------------------------------------ what arrives


@pytest.mark.parametrize("codec", ["raw", "int8", "bf16"])
def test_a_mean_is_weighted_and_has_the_same_bits_everywhere(three, codec):
    weights = (1.0, 0.0, 3.0)
    found = exchanged(three, dataclasses.replace(MEAN, codec=codec), weights=weights)
    expected = (payload(0) + 3.0 * payload(2)) / 4.0
    for result, settled, _ in found:
        torch.testing.assert_close(result.value, expected, rtol=0.0, atol=1e-6 if codec == "raw" else 0.02)
        assert torch.equal(result.value, found[0][0].value)
        assert result.members == (peer_id_of(0), peer_id_of(2))
        assert (result.weights, result.weight_sum, result.notes) == ((1.0, 3.0), 4.0, ())
        assert settled.error is None


@pytest.mark.parametrize("codec", ["raw", "int8", "e3m0", "twobit", "bf16", "topk:64"])
def test_a_gather_gives_every_payload_in_the_order_of_members_as_the_codec_left_it(three, codec):
    """10 elements: their wire forms have odd lengths, and lie one after another."""
    found = exchanged(three, dataclasses.replace(GATHER, codec=codec, num_notes=2), notes=(0.1, 1e300))
    expected = torch.stack([through(codec_named(codec), payload(rank)) for rank in range(3)])
    for rank, (result, _, contribution) in enumerate(found):
        assert torch.equal(result.value, expected)
        assert result.members == tuple(peer_id_of(member) for member in range(3))
        assert result.notes == tuple((0.1 + member, 1e300 + member) for member in range(3))
        delivered = torch.empty(10)
        contribution.read_delivered(delivered)
        assert torch.equal(delivered, expected[rank])


def test_who_has_no_weight_is_no_row_of_a_gather(three):
    for result, _, contribution in exchanged(three, GATHER, weights=(0.5, 0.0, 0.25)):
        assert torch.equal(result.value, torch.stack([payload(0), payload(2)]))
        assert (result.members, result.weights) == ((peer_id_of(0), peer_id_of(2)), (0.5, 0.25))
        assert contribution.weight in (0.5, 0.0, 0.25)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_pairs_get_each_others_payload_and_the_odd_one_nothing(three, codec):
    round_ = dataclasses.replace(PAIR, codec=codec)
    names = [peer_id_of(rank) for rank in range(3)]
    partners = draw_pairs(round_, names)
    found = exchanged(three, round_, weights=(1.0, 2.0, 4.0))
    for rank, (result, settled, _) in enumerate(found):
        assert settled.counts  # for the history all are alike
        if names[rank] not in partners:
            assert result is None
            continue
        partner = partners[names[rank]]
        assert torch.equal(result.value, through(codec_named(codec), payload(names.index(partner))))
        assert result.members == (names[rank], partner)
        assert result.weight_sum == 2.0**rank + 2.0 ** names.index(partner)
    assert [result for result, _, _ in found].count(None) == 1


def test_a_partner_without_weight_is_none(three):
    weights = [0.0, 0.0, 0.0]
    first, second, *_ = (int(name, 16) for name in draw_pairs(PAIR, [peer_id_of(rank) for rank in range(3)]))
    weights[first] = 1.0
    assert {first, second} != {first}
    found = exchanged(three, PAIR, weights=weights)
    assert [result for result, _, _ in found] == [None] * 3


def test_a_round_in_which_nobody_has_a_weight_does_not_count(three):
    for result, settled, _ in exchanged(three, MEAN, weights=(0.0, 0.0, 0.0)):
        assert result is None
        assert len(settled.votes) == 3
        assert not settled.counts


def test_what_a_lossy_mean_delivers_is_told_as_encoded_here(three):
    for rank, (_, _, contribution) in enumerate(exchanged(three, dataclasses.replace(MEAN, codec="int8"), numel=700)):
        delivered = torch.empty(700)
        contribution.read_delivered(delivered)
        assert torch.equal(delivered, through(codec_named("int8"), payload(rank, 700)))
        assert 0.0 < (delivered - payload(rank, 700)).abs().max() < 0.01
        assert torch.equal(contribution.payload, payload(rank, 700))


def test_a_payload_that_is_not_finite_is_sent_as_zero_without_weight(three):
    def work(rank, communicator):
        bad = payload(rank)
        if rank == 1:
            bad[3] = float("inf")
        exchange = Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S).start(
            GATHER, 0, Emitted(payload=bad), 1.0, History()
        )
        return exchange.result(exchange.settle().votes).members, bad

    found = together(three, work)
    assert [members for members, _ in found] == [(peer_id_of(0), peer_id_of(2))] * 3
    assert not found[1][1].any()  # so that no residual keeps it


def test_bytes_that_cannot_be_read_give_nobody_a_result(three, monkeypatch):
    monkeypatch.setattr(outer_exchange, "first_non_finite", lambda _payload: None)

    def work(rank, communicator):
        sent = payload(rank) if rank else torch.full((10,), float("nan"))
        exchange = Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S).start(
            GATHER, 0, Emitted(payload=sent), 1.0, History()
        )
        return exchange.result(exchange.settle().votes)

    assert together(three, work) == [None] * 3


# ------------------------------------------------------------------------------------------ when it counts, how it ends


def test_members_with_other_terms_all_drop_the_round_and_hear_why(three):
    found = exchanged(three, lambda rank: dataclasses.replace(MEAN, codec="int8" if rank == 2 else "bf16"))
    for result, settled, _ in found:
        assert result is None
        assert isinstance(settled.error, PlanMismatch)
        assert settled.error.field == "codec"
        assert [vote.has_result for vote in settled.votes] == [False] * 3


def test_whoever_has_no_result_votes_against_it_for_all(three):
    """Peer 2 gives its payload up when the others have theirs."""

    def work(rank, communicator):
        exchanger = Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S)
        exchange = exchanger.start(MEAN, 0, Emitted(payload=payload(rank)), 1.0, History())
        return exchange.settle()

    class Loses:
        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def all_reduce(self, key, tensor, **more):
            work = self._real.all_reduce(key, tensor, **more)
            work.result(DEADLINE_S)
            broken = type(work)()
            broken.set_exception(OperationAborted(key, "a test wants it so"))
            return broken

    settled = together([three[0], three[1], Loses(three[2])], work)
    for one in settled:
        assert [vote.has_result for vote in one.votes] == [True, True, False]
        assert not one.counts
    assert [one.error is None for one in settled] == [True, True, False]


def test_it_ends_in_time_when_somebody_does_not_come_and_whoever_comes_late_need_not_wait(three):
    is_over, deadline_s = threading.Barrier(3, timeout=DEADLINE_S), 2.0

    def work(rank, communicator):
        exchanger = Exchanger(communicator, codec="raw", deadline_s=deadline_s)
        if rank == 2:
            is_over.wait()
        started = time.monotonic()
        settled = exchanger.start(MEAN, 0, Emitted(payload=payload(rank)), 1.0, History()).settle()
        seconds = time.monotonic() - started
        if rank != 2:
            is_over.wait()
        return settled, seconds

    *early, late = together(three, work)
    for settled, seconds in early:
        assert isinstance(settled.error, OperationAborted)
        assert deadline_s - 0.1 < seconds < 2 * deadline_s
    assert not late[0].counts
    assert late[1] < deadline_s


def test_who_gives_a_payload_up_still_votes_so_that_who_comes_late_knows_all():
    with communicators(2) as (first, second):
        early = Exchanger(first, codec="raw", deadline_s=0.2).start(
            MEAN, 0, Emitted(payload=payload(0)), 1.0, History()
        )
        assert early.settle().votes == ()
        late = Exchanger(second, codec="raw", deadline_s=DEADLINE_S).start(
            MEAN, 0, Emitted(payload=payload(1)), 1.0, History()
        )
        settled = late.settle()
        assert len(settled.votes) == 2
        assert not settled.votes[0].has_result  # the other one's hangs on which is quicker


def test_what_a_method_keeps_comes_back_with_its_contribution(three):
    kept = torch.arange(3.0)
    exchange = Exchanger(three[0], codec="raw", deadline_s=DEADLINE_S).start(
        MEAN, 0, Emitted(payload=payload(0), kept=kept), 1.0, History()
    )
    newer = payload(5)
    contribution = exchange.contribution(newer)
    assert contribution.kept is kept
    assert contribution.newer_payload is newer
    exchange.leave()


def test_a_round_of_an_older_view_breaks_and_can_be_made_again_in_the_new_one(three):
    def begin(rank, communicator):
        exchanger = Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S)
        return exchanger, exchanger.start(MEAN, 0, Emitted(payload=payload(rank)), 1.0, History())

    exchanger, exchange = begin(0, three[0])
    assert exchange.is_current
    install(three, 1)
    assert not exchange.is_current
    settled = exchange.settle()
    assert isinstance(settled.error, OperationAborted)
    assert settled.votes == ()
    again = exchanger.start(MEAN, 0, exchange.emitted, 1.0, History())
    others = [begin(rank, three[rank])[1] for rank in (1, 2)]
    assert all(one.settle().counts for one in (again, *others))


def test_a_round_that_one_refuses_fails_for_the_others_at_once_and_late_ones_too(three):
    starts = [Exchanger(communicator, codec="raw", deadline_s=DEADLINE_S) for communicator in three]
    first = starts[0].start(MEAN, 4, Emitted(payload=payload(0)), 1.0, History())
    refusals = starts[2].refuse(MEAN.inner_step, 4)
    started = time.monotonic()
    assert not first.settle().counts
    for refusal in refusals:
        refusal.cancel()
    assert not starts[1].start(MEAN, 4, Emitted(payload=payload(1)), 1.0, History()).settle().counts
    assert time.monotonic() - started < DEADLINE_S, "nobody waited for it"


def test_what_a_method_or_caller_gives_wrong_is_refused_before_anything_is_sent(three):
    exchanger = Exchanger(three[0], codec="raw", deadline_s=DEADLINE_S)
    with pytest.raises(ValueError, match="notes"):
        exchanger.start(MEAN, 0, Emitted(payload=payload(0), notes=(1.0,)), 1.0, History())
    with pytest.raises(ValueError, match="weight -1"):
        exchanger.start(MEAN, 0, Emitted(payload=payload(0)), -1.0, History())
    with pytest.raises(ValueError, match="weight nan"):
        exchanger.start(MEAN, 0, Emitted(payload=payload(0)), float("nan"), History())
    with pytest.raises(ValueError, match="no codec 'int9'"):
        exchanger.start(dataclasses.replace(MEAN, codec="int9"), 0, Emitted(payload=payload(0)), 1.0, History())
    with pytest.raises(ValueError, match=r"weight 3\.6"):
        exchanger.start(MEAN, 0, Emitted(payload=payload(0)), 2.0**65, History())


def test_what_the_operation_finds_impossible_is_the_callers_error_and_no_accident(three):
    class Refuses:
        def __getattr__(self, name):
            return getattr(three[0], name)

        def all_reduce(self, key, tensor, **more):
            return three[0].all_reduce(key, tensor, **(more | {"op": "median"}))

    exchanger = Exchanger(Refuses(), codec="raw", deadline_s=0.3)
    with pytest.raises(ValueError, match="no operation 'median'"):
        exchanger.start(MEAN, 0, Emitted(payload=payload(0)), 1.0, History()).settle()


# ------------------------------------------------------------------------------------------ votes


def vote(weight=1.0, *, has_result=True, history=History()):  # noqa: B008 - a value
    return Vote(has_result=has_result, history=history, weight=weight)


def test_a_vote_survives_its_row_to_the_last_bit():
    given = Vote(
        has_result=True,
        history=History(num_rounds=2**40, digest=2**48 - 1),
        weight=1.0 / 3.0,
        notes=(0.1, -1e-300),
    )
    assert Vote.from_row(given.to_row()) == given
    torn = dataclasses.replace(given, history=given.history.torn(), has_result=False)
    assert Vote.from_row(torn.to_row()) == torn


def test_histories_are_equal_only_after_the_same_rounds_in_the_same_order_with_the_same_weights():
    votes = (vote(1.0), vote(2.0))
    later = dataclasses.replace(MEAN, inner_step=2)
    one = History().after(MEAN, 0, votes).after(later, 0, votes)
    assert one == History().after(MEAN, 0, votes).after(later, 0, votes)
    others = [
        History().after(later, 0, votes).after(MEAN, 0, votes),
        History().after(MEAN, 1, votes).after(later, 0, votes),
        History().after(MEAN, 0, votes[::-1]).after(later, 0, votes),
    ]
    assert len({one, *others}) == 4
    assert {history.num_rounds for history in (one, *others)} == {2}


def test_differing_or_torn_histories_need_a_repair_by_the_first_of_those_with_most_rounds():
    behind, ahead = History(num_rounds=3, digest=7), History(num_rounds=4, digest=9)
    assert not Settled(votes=(vote(history=ahead), vote(history=ahead))).needs_repair
    assert not Settled().needs_repair
    mixed = Settled(votes=(vote(history=behind), vote(history=ahead), vote(history=ahead)))
    assert mixed.needs_repair
    assert mixed.leader == 1
    torn = Settled(votes=(vote(history=ahead.torn()), vote(history=ahead.torn())))
    assert torn.needs_repair
    assert torn.leader == 0
    assert ahead.torn().mended() != ahead.torn()
    assert ahead.mended() == ahead

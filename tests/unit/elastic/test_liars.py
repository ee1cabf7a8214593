# SPDX-License-Identifier: Apache-2.0
"""Members that lie: about their weight, their numbers, each other, or the result. Each loses only itself."""

import pytest

from isthmus.collective.core.types import HUGE
from isthmus.elastic.core.certificate import ballot
from isthmus.elastic.core.events import PeerSaid
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    IndexRange,
    LeaseGrant,
    LeaseRequest,
    NewView,
    Refused,
    Vote,
    Welcome,
)
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from isthmus.elastic.core.work import MAX_STRIKES, Strikes
from tests.unit.elastic.machines import KEYS, CoordinatorDriver, MemberDriver, held, key, payload, ref, view

OTHER = b"\xee" * 32


class Members(CoordinatorDriver):
    """A coordinator and members that say what they saw; each weighs as many as its number, if nobody lies."""

    def votes(
        self,
        number: int,
        *,
        weight: float | None = None,
        seen: dict[int, float] | None = None,
        sizes: dict[int, float] | None = None,
        sums: dict[int, float] | None = None,
        digest: bytes | None = None,
        results: dict[int, bytes] | None = None,
        consumed: tuple[IndexRange, ...] = (),
        fragment: int = 0,
    ) -> None:
        current, numbers = self.machine.state.view, self.member_numbers()
        weights = {other: float(other) for other in numbers} | {number: float(weight or number)} | (seen or {})
        known = dict.fromkeys(numbers, 1.0) | (sizes or {})
        vote = Vote(
            key=key(current.epoch, current.outer_step, fragment),
            digest=digest or held(current.outer_step + 1).digest,
            weight=weights[number] if weight is None else weight,
            num_tokens=1,
            consumed=consumed,
            weights=tuple(weights[other] for other in numbers),
            sizes=tuple(known[other] for other in numbers),
            sums=tuple((sums or {}).get(other, 0.0) for other in numbers) if sums is not None else (),
            results=tuple((results or {}).get(other, b"sum") for other in numbers),
        )
        self.says(number, vote)

    def vote(self, number: int, digest: bytes | None = None, *consumed: IndexRange, epoch: int | None = None) -> None:
        """Without a weight, and without a word of the others."""
        current = self.machine.state.view
        round_key = key(current.epoch if epoch is None else epoch, current.outer_step)
        made = digest or held(current.outer_step + 1).digest
        self.says(number, Vote(key=round_key, digest=made, weight=0.0, num_tokens=0, consumed=consumed))

    def all_vote_but(self, *numbers: int) -> None:
        for number in self.member_numbers():
            if number not in numbers:
                self.votes(number)

    def comes_back(self, number: int) -> None:
        """A member that was put out joins again and is a member after the next commit."""
        self.join(number, self.machine.state.committed, epoch=self.machine.state.epoch)
        self.all_vote_but()
        assert number in self.member_numbers()

    @property
    def step(self) -> int:
        return self.machine.state.outer_step

    def is_struck(self, number: int) -> bool:
        return any(ref(number) in record.struck for record in self.records(ViewRecord))


def members(*numbers: int, **config: object) -> Members:
    driver = Members(**config)
    driver.with_members(*numbers)
    return driver


# ------------------------------------------------------------------------ weights and leases


def lease(driver: Members, number: int, num_samples: int, serial: int = 0) -> tuple[IndexRange, ...]:
    epoch = driver.machine.state.epoch
    driver.says(number, LeaseRequest(epoch=epoch, serial=serial, num_samples=num_samples))
    return driver.told(number, LeaseGrant).ranges


def test_a_weight_that_the_leases_allow_is_counted_and_a_larger_one_puts_its_sender_out() -> None:
    driver = members(1, 2, 3, weight_per_sample=1.0)
    leases = {number: lease(driver, number, number) for number in (1, 2, 3)}
    step = driver.step
    for number in (1, 2):
        driver.votes(number, consumed=leases[number])
    driver.votes(3, weight=1e12, consumed=leases[3])
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)
    assert "claims weight 1e+12 where its leases allow 3" in driver.told(3, Evicted).reason
    for number in (1, 2):
        driver.votes(number, consumed=leases[number])
    assert driver.step == step + 1, "the others go on at once"


def test_samples_of_another_member_are_behind_nobodys_weight() -> None:
    driver = members(1, 2, weight_per_sample=1.0)
    stolen = lease(driver, 1, 100)
    driver.votes(2, consumed=stolen)
    assert driver.member_numbers() == [1]


def test_with_fragments_the_samples_of_several_votes_are_behind_a_weight_and_each_counts_once_a_fragment() -> None:
    driver = members(1, weight_per_sample=1.0)
    first, second = lease(driver, 1, 10), lease(driver, 1, 10, serial=1)
    driver.votes(1, weight=10.0, consumed=first, fragment=0)
    step = driver.step
    driver.votes(1, weight=20.0, consumed=second, fragment=1)
    assert driver.step == step + 1
    restarted = driver.recovered()
    assert restarted.machine.state.work.num_samples(ref(1), 0, ()) == 10
    assert restarted.machine.state.work.num_samples(ref(1), 1, ()) == 0


# ------------------------------------------------------------------------ signed votes


@pytest.mark.parametrize("signature", [b"", b"s" * 96, KEYS.of(ref(1).peer_id).sign(b"something else")])
def test_a_member_that_has_not_signed_what_it_votes_for_is_put_out_and_the_others_go_on(signature: bytes) -> None:
    driver = members(1, 2, 3)
    step, current = driver.step, driver.machine.state.view
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(current.outer_step + 1).digest,
        weight=3.0,
        num_tokens=1,
        consumed=(),
        signature=signature,
    )
    driver.feed(PeerSaid(sender=ref(3), message=vote))
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)
    assert "has not signed what it votes for" in driver.told(3, Evicted).reason
    driver.all_vote_but()
    assert driver.step == step + 1


def test_a_vote_that_another_member_has_signed_is_not_that_members() -> None:
    driver = members(1, 2)
    current = driver.machine.state.view
    words = ballot(key(current.epoch, current.outer_step), current.digest, held(9).digest, ref(2), 1.0)
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(9).digest,
        weight=1.0,
        num_tokens=1,
        consumed=(),
        signature=KEYS.of(ref(1).peer_id).sign(words),
    )
    driver.feed(PeerSaid(sender=ref(2), message=vote))
    assert driver.member_numbers() == [1]


def test_the_certificate_carries_the_ballots_of_a_majority_and_none_of_who_was_overruled() -> None:
    driver = members(1, 2, 3, 4, 5)
    for number in (1, 2, 4):
        driver.votes(number)
    for number in (3, 5):
        driver.votes(number, digest=OTHER)
    certificate = driver.told(1, Commit).certificate
    assert certificate.check(KEYS)
    assert [bool(item.signature) for item in certificate.contributors] == [True, True, False, True, False]
    restarted = driver.recovered().machine.state.certificate
    assert restarted is not None
    assert restarted.contributors == certificate.contributors


# ------------------------------------------------------------------------ the same weights for all


def test_a_member_that_tells_everybody_another_weight_is_put_out_and_the_round_is_tried_again_without_it() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but(1, 2)
    driver.votes(1, seen={4: 40.0})
    driver.votes(2, seen={4: 44.0})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.is_struck(4)
    step = driver.step
    driver.all_vote_but()
    assert driver.step == step + 1


@pytest.mark.parametrize("numbers", [(1, 2), (1, 2, 3)])
def test_of_two_that_differ_about_a_weight_nobody_goes_and_the_coordinator_says_the_weights(
    numbers: tuple[int, ...],
) -> None:
    driver = members(*numbers)
    epoch, step = driver.machine.state.epoch, driver.step
    driver.all_vote_but(1)
    driver.votes(1, seen={2: 20.0})
    assert (driver.machine.state.epoch, driver.member_numbers()) == (epoch + 1, list(numbers))
    for number in numbers:
        assert driver.told(number, NewView).weights == tuple(map(float, numbers))
    driver.all_vote_but()
    assert driver.step == step + 1
    assert not driver.machine.state.strikes.of(ref(1).peer_id)


def test_who_counts_with_other_weights_than_it_was_told_is_put_out() -> None:
    driver = members(1, 2, 3)
    for _ in range(2):
        driver.all_vote_but(1)
        driver.votes(1, seen={2: 20.0})
    assert driver.member_numbers() == [2, 3]
    assert driver.is_struck(1)


def test_who_says_of_one_member_after_the_other_that_it_lies_is_put_out_itself() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(1)
    driver.votes(1, seen={2: 20.0})
    driver.all_vote_but()
    driver.all_vote_but(1)
    driver.votes(1, seen={3: 30.0})
    assert driver.member_numbers() == [2, 3]


def test_who_says_nothing_of_what_it_saw_is_put_out() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(2)
    driver.vote(2)
    assert driver.member_numbers() == [1, 3]


def test_weights_that_were_told_are_of_the_views_first_round_only() -> None:
    driver = MemberDriver(held(4))
    mine = view(3, 4, 1, 2)
    driver.active_in(view(2, 4, 1, 2))
    driver.hears(NewView(view=mine, weights=(2.0, 5.0)))
    (start,) = [item for item in driver.feed(payload(4)) if hasattr(item, "weights")]
    assert start.weights == (2.0, 5.0)
    driver.hears(NewView(view=view(4, 4, 1, 2)))
    (start,) = [item for item in driver.effects if hasattr(item, "weights")]
    assert start.weights == ()


# ------------------------------------------------------------------------ numbers out of the others' range


def test_a_part_that_all_find_too_large_is_left_out_and_its_sender_is_struck() -> None:
    driver = members(1, 2, 3, 4)
    for number in (1, 2, 3, 4):
        driver.votes(number, sizes={3: 1e6})
    assert driver.member_numbers() == [1, 2, 4]
    assert driver.is_struck(3)
    assert "times as large as the others'" in driver.records(ViewRecord)[-1].cause


def test_a_part_that_one_member_finds_too_large_is_left_out_but_one_voice_is_no_strike() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but(1)
    driver.votes(1, sizes={3: 1e6})
    assert driver.member_numbers() == [1, 2, 4]
    assert not driver.is_struck(3)
    driver.all_vote_but(1)
    driver.votes(1, sizes={2: 1e6})
    assert driver.member_numbers() == [2, 4], "who points at one after the other goes itself"
    assert driver.is_struck(1)


def test_who_finds_the_same_members_part_too_large_again_goes_itself_by_turns_and_stays_out_for_longer() -> None:
    driver = Members().with_veterans(1, 2, 3, 4)
    assert isinstance(driver, Members)
    out, pauses = [], []
    for _ in range(6):
        for number in (1, 2, 3, 4):
            driver.votes(number, sizes={1: 1e6} if number == 4 else None)
        assert len(driver.member_numbers()) == 3
        assert not driver.is_struck(1)
        (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
        num_commits = 0
        while gone not in driver.member_numbers():
            driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            driver.all_vote_but()
            num_commits += 1
        out.append(gone)
        pauses.append(num_commits)
    assert out == [1, 4, 1, 4, 1, 4]
    assert pauses == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(("accuser", "accused"), [(1, 2), (2, 1)])
def test_of_two_members_the_newer_one_goes_whoever_finds_the_others_part_too_large(accuser: int, accused: int) -> None:
    driver = Members()
    driver.with_members(1, 2)
    for number in (1, 2):
        driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
    assert driver.member_numbers() == [1]
    assert not driver.is_struck(2)


@pytest.mark.parametrize(("accuser", "accused"), [(1, 2), (2, 1)])
def test_of_two_members_that_can_commit_only_together_each_goes_in_turn(accuser: int, accused: int) -> None:
    # Seed 9379: the older one's payload was wrong, and it kept that payload for ever.
    driver = members(1, 2, min_peers=2)
    out = []
    for _ in range(4):
        for number in (1, 2):
            driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
        (gone,) = {1, 2}.difference(driver.member_numbers())
        driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        out.append(gone)
    assert out == [2, 1, 2, 1]
    driver.all_vote_but()
    assert driver.step == 1
    for number in (1, 2):
        driver.votes(number, sizes={accused: 1e6} if number == accuser else None)
    assert driver.member_numbers() == [2], "a commit begins the turns anew: 1 came last"


def test_who_has_done_more_may_send_more_in_proportion_and_a_fresh_member_less() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    weights = {1: 500.0, 2: 2.0, 3: 2.0}
    for number in (1, 2, 3):
        driver.votes(number, weight=weights[number], seen=weights, sizes={1: 200.0, 2: 1.0, 3: 2.0})
    assert driver.step == step + 1


def test_of_two_the_usual_size_of_the_last_rounds_says_what_is_large() -> None:
    driver = members(1, 2)
    driver.all_vote_but()
    step = driver.step
    for number in (1, 2):
        driver.votes(number, sizes={1: 0.01, 2: 2.0})
    assert driver.step == step + 1, "nearly as usual, whatever the other one sends"
    for number in (1, 2):
        driver.votes(number, sizes={2: 1e6})
    assert driver.member_numbers() == [1]


def test_members_without_weight_or_numbers_are_no_measure() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: 50.0})
    assert driver.step == step + 1


def test_without_a_guard_numbers_may_be_as_large_as_they_like() -> None:
    driver = members(1, 2, 3, norm_guard=float("inf"))
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e29})
    assert driver.step == step + 1


@pytest.mark.parametrize("norm_guard", [10.0, float("inf")])
def test_numbers_that_cannot_be_counted_are_too_large_without_a_guard_and_beside_members_that_send_none(
    norm_guard: float,
) -> None:
    driver = members(1, 2, 3, norm_guard=norm_guard)
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: HUGE})
    assert driver.is_struck(3)
    assert (driver.step, driver.member_numbers()) == (step, [1, 2])


# ------------------------------------------------------------------------ sums out of the parts' range


def framed(driver: Members, *, liar: int, victim: int, size: float = 100.0, mean: float = 25.0) -> None:
    """The liar's part is large in the victim's slice alone: it is a part to that one, and its sum to all others."""
    for number in driver.member_numbers():
        is_victim = number == victim
        driver.votes(number, sizes={liar: size} if is_victim else None, sums=None if is_victim else {victim: mean})


def test_who_is_sent_large_numbers_for_its_own_slice_is_not_named_for_the_sum_that_holds_them() -> None:
    """Before, all others pointed at it (code 9 after three rounds), and it alone at the liar."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=4, victim=3)
    assert not driver.is_struck(3)
    assert not driver.is_struck(4), "one word against another"
    assert 4 not in driver.member_numbers()


@pytest.mark.parametrize("liar", [1, 4])
def test_who_frames_another_goes_first_though_it_votes_as_if_it_had_sent_nothing(liar: int) -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=liar, victim=3)
    assert {1, 2, 3, 4}.difference(driver.member_numbers()) == {liar}


def test_who_frames_one_member_after_the_other_has_lied() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    framed(driver, liar=4, victim=3)
    driver.comes_back(4)
    framed(driver, liar=4, victim=2)
    assert driver.is_struck(4)
    assert driver.member_numbers() == [1, 2, 3]


def test_who_is_framed_by_the_same_member_again_and_again_is_never_named_and_out_for_every_other_time() -> None:
    driver = Members().with_veterans(1, 2, 3, 4)
    assert isinstance(driver, Members)
    driver.all_vote_but()
    out = []
    for _ in range(4):
        framed(driver, liar=4, victim=3)
        (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
        out.append(gone)
        while gone not in driver.member_numbers():
            driver.join(gone, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            driver.all_vote_but()
    assert out == [4, 3, 4, 3]
    assert not any(driver.is_struck(number) for number in (1, 2, 3, 4))


def test_a_sum_of_numbers_that_their_senders_work_allows_counts() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    step, weights = driver.step, {1: 1.0, 2: 1.0, 3: 1.0, 4: 16.0}
    for number in (1, 2, 3, 4):
        sizes, sums = {4: 100.0} if number >= 3 else None, None if number >= 3 else {3: 84.0}
        driver.votes(number, weight=weights[number], seen=weights, sizes=sizes, sums=sums)
    assert driver.step == step + 1


def test_numbers_that_cannot_be_counted_and_go_to_one_root_alone_do_not_make_that_one_a_liar() -> None:
    driver = members(1, 2, 3, 4, norm_guard=float("inf"))
    framed(driver, liar=4, victim=3, size=HUGE, mean=HUGE)
    assert driver.member_numbers() == [1, 2, 3]
    assert not driver.is_struck(4)


def test_a_sum_is_measured_by_numbers_of_another_place_than_the_part_that_explains_it() -> None:
    """Where the root adds up all numbers are a tenth as large as where the others do."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (1, 2, 4):
        driver.votes(number, sums={3: 25.0})
    driver.votes(3, sizes={1: 0.1, 2: 0.1, 3: 0.1, 4: 12.0})
    assert not driver.is_struck(3)
    assert driver.member_numbers() == [1, 2, 3]


def test_a_root_that_gives_all_a_false_sum_and_says_that_nobodys_part_was_large_is_named() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (2, 3, 4):
        driver.votes(number, sums={1: 25.0})
    driver.votes(1)
    assert driver.is_struck(1)
    assert "25 times as large as the others'" in driver.records(ViewRecord)[-1].cause


def test_a_root_that_blames_another_member_for_its_false_sum_is_at_odds_with_that_one_and_then_with_a_second() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for blamed in (1, 2):
        for number in (1, 2, 3):
            driver.votes(number, sums={4: 25.0})
        driver.votes(4, sizes={blamed: 100.0})
        if blamed == 1:
            assert not any(driver.is_struck(number) for number in (1, 2, 3, 4))
            (gone,) = {1, 2, 3, 4}.difference(driver.member_numbers())
            assert gone in (1, 4)
            driver.comes_back(gone)
    assert driver.is_struck(4)
    assert not any(driver.is_struck(number) for number in (1, 2, 3))


def test_what_a_root_says_of_a_members_part_explains_no_sum_to_that_member() -> None:
    """So no part that is just in range hides a false sum."""
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    step = driver.step
    for number in (2, 3, 4):
        driver.votes(number, sums={1: 15.0})
    driver.votes(1, sizes={2: 8.0})
    assert driver.step == step
    assert driver.member_numbers() == [2, 3, 4]


def test_who_sends_large_numbers_to_all_is_named_whatever_it_says_of_others() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for number in (1, 2, 3):
        driver.votes(number, sizes={4: 100.0})
    driver.votes(4, sizes={1: 100.0, 2: 100.0})
    assert driver.is_struck(4)


def test_sums_do_not_become_usual() -> None:
    driver = members(1, 2, 3, 4)
    driver.all_vote_but()
    for _ in range(8):
        for number in (1, 2, 3, 4):
            driver.votes(number, sums={1: 9.0} if number != 1 else None)
    for number in (1, 2, 3, 4):
        driver.votes(number, sizes={1: 12.0} if number != 1 else None)
    assert driver.is_struck(1)


def test_who_tells_the_sums_of_some_members_alone_is_put_out() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but(3)
    current = driver.machine.state.view
    vote = Vote(
        key=key(current.epoch, current.outer_step),
        digest=held(current.outer_step + 1).digest,
        weight=3.0,
        num_tokens=1,
        consumed=(),
        weights=(1.0, 2.0, 3.0),
        sizes=(1.0, 1.0, 1.0),
        sums=(0.0,),
    )
    driver.says(3, vote)
    assert driver.member_numbers() == [1, 2]
    assert driver.is_struck(3)


# ------------------------------------------------------------------------ the same sums for all


def test_a_member_that_gives_half_of_the_others_another_sum_is_put_out_instead_of_halting_the_run() -> None:
    driver = members(1, 2, 3, 4)
    step = driver.step
    for number in (1, 4):
        driver.votes(number)
    for number in (2, 3):
        driver.votes(number, digest=OTHER, results={4: b"another"})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.is_struck(4)
    driver.all_vote_but()
    assert driver.step == step + 1


def test_to_be_overruled_for_a_sum_that_one_member_gave_is_no_strike() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    for number in (1, 2):
        driver.votes(number)
    driver.votes(3, digest=OTHER, results={1: b"another"})
    assert (driver.step, driver.member_numbers()) == (step + 1, [1, 2])
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 0
    assert driver.records(CommitRecord)[-1].disputed == (ref(3),)


def test_where_all_have_the_same_result_what_they_say_of_sums_is_nothing() -> None:
    driver = members(1, 2, 3)
    step = driver.step
    driver.all_vote_but(3)
    driver.votes(3, results={1: b"another", 2: b"another"})
    assert driver.step == step + 1


# ------------------------------------------------------------------------ three times in a row


def test_who_deviates_three_times_in_a_row_is_sent_home_and_a_restart_of_the_coordinator_does_not_forget() -> None:
    driver = members(1, 2, 3)
    for deviation in range(1, MAX_STRIKES + 1):
        if deviation > 1:
            driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
            for number in (1, 2):
                driver.vote(number)
        driver.vote(1)
        driver.vote(3, OTHER)
        driver.vote(2)
        assert driver.member_numbers() == [1, 2]
        if deviation < MAX_STRIKES:
            assert driver.told(3, Evicted)
    refused = driver.told(3, Refused)
    assert refused.code == 9
    assert ref(3).peer_id in refused.reason
    assert "3 times in a row" in refused.reason
    assert driver.recovered().machine.state.strikes.of(ref(3).peer_id) == MAX_STRIKES


def deviates(driver: Members) -> None:
    driver.vote(1)
    driver.vote(3, OTHER)
    driver.vote(2)


def deviated_twice() -> Members:
    driver = members(1, 2, 3)
    for _ in range(MAX_STRIKES - 1):
        deviates(driver)
        driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        for number in (1, 2):
            driver.vote(number)
    assert driver.member_numbers() == [1, 2, 3]
    return driver


def test_who_deviates_for_the_third_time_goes_also_if_the_coordinator_dies_before_it_says_so() -> None:
    driver = deviated_twice()
    deviates(driver)
    last = max(at for at, record in enumerate(driver.journal) if isinstance(record, CommitRecord))
    del driver.journal[last + 1 :]
    again = driver.recovered()
    assert again.member_numbers() == [1, 2, 3], "no view has followed the commit"
    again.join(1, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    assert again.member_numbers() == [1, 2]
    assert again.told(3, Refused).code == 9


def test_start_of_a_peer_that_was_sent_home_for_its_deviations_is_not_let_in_again_but_the_next_one_is() -> None:
    driver = deviated_twice()
    deviates(driver)
    driver.join(3, epoch=driver.machine.state.epoch)
    assert driver.told(3, Refused).code == 9
    driver.join(3, epoch=driver.machine.state.epoch, incarnation=2)
    assert driver.told(3, Welcome, incarnation=2)


def test_one_round_that_a_deviant_agrees_to_ends_the_row() -> None:
    driver = members(1, 2, 3)
    for _ in range(MAX_STRIKES):
        driver.vote(1)
        driver.vote(3, OTHER)
        driver.vote(2)
        driver.told(3, Evicted)
        driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
        for number in (1, 2):
            driver.vote(number)
        driver.all_vote_but()
        assert driver.member_numbers() == [1, 2, 3]
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 0


def test_a_commit_to_which_a_liar_gave_nothing_does_not_end_the_row() -> None:
    driver = members(1, 2, 3)
    driver.vote(1)
    driver.vote(3, OTHER)
    driver.vote(2)
    driver.join(3, driver.machine.state.committed, epoch=driver.machine.state.epoch)
    for number in (1, 2):
        driver.vote(number)
    for number in (1, 2, 3):
        driver.vote(number)  # without a weight
    assert driver.machine.state.strikes.of(ref(3).peer_id) == 1


def test_strikes_are_kept_of_so_many_peers_and_no_more() -> None:
    strikes = Strikes()
    for number in range(2000):
        strikes.add(ref(number))
    assert strikes.of(ref(1999).peer_id) == 1
    assert strikes.of(ref(0).peer_id) == 0


def test_a_veteran_among_newcomers_that_warm_up_is_measured_by_what_was_usual() -> None:
    driver = members(1, 2, 3)
    driver.all_vote_but()
    step = driver.step
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 1.0, 2: 0.05, 3: 0.05})
    assert driver.step == step + 1


def test_a_founder_that_has_trained_alone_stays_beside_a_first_newcomer_that_warms_up() -> None:
    driver = members(1)
    for _ in range(3):
        driver.votes(1, sizes={1: 1.0})
    driver.comes_back(2)
    step = driver.step
    for _ in range(3):
        for number in (1, 2):
            driver.votes(number, sizes={1: 1.0, 2: 0.03})
    assert driver.step == step + 3
    assert driver.member_numbers() == [1, 2]


def test_a_veteran_stays_beside_newcomers_that_warm_up_for_longer_than_what_was_usual_is_known() -> None:
    """Before, it was called a liar (scripts/methods: a peer of a Streaming run that had been there all the time)."""
    driver = members(1, 2, 3)
    driver.all_vote_but()
    step = driver.step
    for _ in range(30):
        for number in (1, 2, 3):
            driver.votes(number, sizes={1: 1.4, 2: 0.05, 3: 0.05})
    assert driver.step == step + 30
    assert driver.member_numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 3.0, 2: 0.05, 3: 0.05})
    assert driver.member_numbers() == [2, 3], "twice what it has sent before is no habit of it"
    assert driver.is_struck(1)


def test_what_a_member_says_of_its_own_numbers_excuses_nothing() -> None:
    driver = members(1, 2, 3)
    for _ in range(10):
        for number in (1, 2, 3):
            driver.votes(number, sizes={3: 1e6} if number == 3 else {})
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e6})
    assert driver.is_struck(3)


def test_noise_of_who_alone_gave_something_does_not_become_usual() -> None:
    """The others' parts weighed nothing, so nobody could compare (seed 5060 of the simulator)."""
    driver = members(1, 2, 3)
    for number in (1, 2, 3):
        driver.votes(number, sizes={1: 0.0, 2: 0.0, 3: 1e6})
    for number in (1, 2, 3):
        driver.votes(number, sizes={3: 1e6})
    assert driver.is_struck(3)


def test_noise_that_went_through_while_nothing_was_known_is_its_senders_own_for_twenty_rounds_and_never_usual() -> None:
    driver = members(1, 2)
    step = driver.step
    for number in (1, 2) * 21:
        driver.votes(number, sizes={1: 1.0, 2: 90.0})
    assert driver.step == step + 21, "before the first commit nobody knows what is large"
    assert driver.member_numbers() == [1, 2]
    for number in (1, 2):
        driver.votes(number, sizes={1: 1.0, 2: 90.0})
    assert driver.member_numbers() == [1]


def test_a_veteran_stays_if_nobody_knows_it_and_newcomers_warm_up_over_more_rounds_than_one() -> None:
    """A run that is resumed from a checkpoint: the founder has its moments, the first newcomers have none."""
    driver = members(1, 2, 3)
    step = driver.step
    for done in range(30):
        fresh = (done + 0.5) / 30
        for number in (1, 2, 3):
            driver.votes(number, sizes={1: 1.0, 2: fresh, 3: fresh})
    assert driver.member_numbers() == [1, 2, 3]
    assert driver.step == step + 30


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_coordinator_that_starts_again_knows_what_is_usual_and_what_each_member_has_sent(is_compacted: bool) -> None:
    """Before, honest veterans were put out after a power cut: the first that warmed up was the measure of all."""
    driver = members(1, 2, 3)
    for _ in range(6):
        driver.all_vote_but()
    if is_compacted:
        driver.journal[:] = [driver.machine.state.snapshot()]
    again = driver.recovered()
    for number in (1, 2, 3):
        again.join(number, again.machine.state.committed, epoch=again.machine.state.epoch)
    assert again.member_numbers() == [1, 2, 3]
    step = again.step
    for _ in range(8):
        for number in (1, 2, 3):
            again.votes(number, sizes={1: 1.0, 2: 0.005, 3: 0.005})
    assert again.step == step + 8
    for number in (1, 2, 3):
        again.votes(number, sizes={1: 1.0, 2: 0.005, 3: 90.0})
    assert again.is_struck(3), "the wide limit is for a run of which nothing is known"

# SPDX-License-Identifier: Apache-2.0
"""One peer's way through a run, told as what it hears and what it then orders."""

import pytest

from isthmus.collective.core.types import Epoch, OuterStep, PeerId, View
from isthmus.elastic.core.events import (
    AbortExchange,
    BecomeActive,
    BecomeLearner,
    CarryOver,
    CatchUp,
    CatchUpFailed,
    CaughtUp,
    Connected,
    Disconnected,
    ExchangeDone,
    ExchangeFailed,
    Finish,
    FoundState,
    InstallStaged,
    InstallView,
    LeasesWanted,
    LeaveRequested,
    Progressed,
    StartExchange,
    TakeLeases,
    Tick,
)
from isthmus.elastic.core.messages import (
    Commit,
    Evicted,
    Goodbye,
    Heartbeat,
    Held,
    IndexRange,
    Join,
    LeaseGrant,
    LeaseRequest,
    Leave,
    NewView,
    Refused,
    RoundFailed,
    Synced,
    Vote,
    Welcome,
)
from isthmus.elastic.core.place import Phase
from tests.unit.elastic.machines import MANIFEST, MemberDriver, certificate, held, key, member, payload, ref, view


def commit(epoch: int, step: int, *, kind: int = 0, final: bool = False) -> Commit:
    return Commit(certificate=certificate(epoch, step, kind=kind, final=final))


def active(step: int = 4, epoch: int = 3, *others: int) -> MemberDriver:
    """An active member (number 1) of a view with 1, 2 and the others."""
    return MemberDriver(held(step)).active_in(view(epoch, step, 1, 2, *others))


def staged(step: int = 4, epoch: int = 3) -> MemberDriver:
    """The same after its exchange is done: it has voted."""
    return active(step, epoch).hands_in(IndexRange(0, 5))


# ------------------------------------------------------------------------ joining


def test_peer_joins_as_soon_as_it_is_connected_and_again_until_it_is_answered() -> None:
    driver = MemberDriver(held(2), resend_interval_s=1.0)
    driver.feed(Connected())
    join = Join(address="host1:1", manifest_digest=MANIFEST, held=held(2))
    assert driver.said() == [join]
    assert driver.machine.next_deadline() == pytest.approx(1.0)
    driver.now = 1.0
    driver.feed(Tick())
    assert driver.said() == [join]


def test_peer_that_is_asked_to_found_makes_the_state_once() -> None:
    driver = MemberDriver()
    driver.feed(Connected())
    welcome = Welcome(epoch=Epoch(0), target=None, donors=(), found=True)
    assert driver.hears(welcome) == [FoundState()]
    assert driver.hears(welcome) == []
    driver.feed(CaughtUp(held=held(0)))
    assert driver.said() == [Synced(held=held(0))]


def test_learner_follows_commits_instead_of_starting_over() -> None:
    driver = MemberDriver()
    driver.feed(Connected())
    donors = (member(2), member(3))
    driver.hears(Welcome(epoch=Epoch(3), target=held(4), donors=donors))
    assert driver.ordered() == [CatchUp(target=held(4), donors=donors)]
    driver.hears(commit(3, 4))
    assert driver.ordered() == [], "a running catch-up is left alone"
    driver.feed(CaughtUp(held=held(4)))
    assert driver.said() == [Synced(held=held(4))]
    assert driver.ordered() == [CatchUp(target=held(5), donors=donors)]


def test_learner_tries_again_after_a_pause_with_the_newest_donors() -> None:
    driver = MemberDriver(catch_up_retry_s=0.5)
    driver.feed(Connected())
    driver.hears(Welcome(epoch=Epoch(3), target=held(4), donors=(member(2),)))
    driver.feed(CatchUpFailed(cause="gone"))
    driver.hears(Welcome(epoch=Epoch(3), target=held(4), donors=(member(3),)))
    assert driver.ordered() == []
    driver.now = 0.5
    driver.feed(Tick())
    assert driver.ordered() == [CatchUp(target=held(4), donors=(member(3),))]


# ------------------------------------------------------------------------ views


def test_member_that_holds_the_state_of_its_view_is_active() -> None:
    driver = MemberDriver(held(4))
    driver.feed(Connected())
    mine = view(3, 4, 1, 2)
    assert driver.hears(NewView(view=mine)) == [InstallView(view=mine), BecomeActive(view=mine)]


@pytest.mark.parametrize("other", [held(3), held(4, kind=9), None])
def test_member_that_holds_anything_else_catches_up_and_never_votes(other: Held | None) -> None:
    driver = MemberDriver(other)
    driver.feed(Connected())
    mine = view(3, 4, 1, 2)
    expected = [InstallView(view=mine), CatchUp(target=held(4), donors=(member(2),))]
    assert driver.hears(NewView(view=mine)) == expected
    driver.feed(payload(4))
    assert driver.effects == []
    driver.feed(CaughtUp(held=held(4)))
    assert driver.ordered() == [BecomeActive(view=mine)]


def test_who_catches_up_never_says_that_it_is_blocked() -> None:
    driver = MemberDriver(held(3), heartbeat_interval_s=1.0)
    driver.feed(Connected())
    driver.hears(NewView(view=view(3, 4, 1, 2)))
    driver.feed(Progressed(progress=7, blocked=True))
    driver.now = 1.0
    driver.feed(Tick())
    assert Heartbeat(epoch=Epoch(3), outer_step=OuterStep(3), progress=7, blocked=False) in driver.said()


def test_new_view_of_the_same_step_starts_the_exchange_again_from_the_same_payload() -> None:
    driver = active(4, 3, 5)
    driver.feed(payload(4))
    mine = view(4, 4, 1, 2)
    assert driver.hears(NewView(view=mine)) == [
        AbortExchange(key=key(3, 4)),
        InstallView(view=mine),
        StartExchange(view=mine, key=key(4, 4), weight=2.0),
    ]


@pytest.mark.parametrize("old", [view(2, 4, 1, 2), view(3, 4, 1, 2), view(3, 3, 1, 2)])
def test_old_or_repeated_view_changes_nothing(old: View) -> None:
    driver = active(4, 3)
    assert driver.hears(NewView(view=old)) == []
    assert driver.machine.counters["old_epoch"] == 1


# ------------------------------------------------------------------------ rounds


def test_vote_is_repeated_until_the_commit_installs_what_is_staged() -> None:
    driver = staged()
    (vote,) = driver.said()
    assert isinstance(vote, Vote)
    assert (vote.key, vote.digest, vote.consumed) == (key(3, 4), held(5).digest, (IndexRange(0, 5),))
    driver.now = 1.0
    driver.feed(Tick())
    assert vote in driver.said()
    made = commit(3, 4).certificate
    driver.hears(Commit(certificate=made))
    assert driver.ordered() == [InstallStaged(key=key(3, 4), held=held(5), final=False, position=made.position)]
    assert driver.kept() == [made]
    driver.now = 2.0
    driver.feed(Tick())
    assert [type(item) for item in driver.said()] == [Heartbeat]
    assert driver.hears(commit(3, 4)) == [], "a second copy installs nothing"


def test_missed_commit_is_learnt_from_the_next_view() -> None:
    driver = staged()
    mine = view(4, 5, 1, 2)
    assert driver.hears(NewView(view=mine, contributed=held(5))) == [
        InstallStaged(key=key(3, 4), held=held(5), final=False),
        InstallView(view=mine),
    ]
    assert driver.machine.phase is Phase.ACTIVE


def test_missed_commit_is_learnt_from_a_repeated_view_of_the_same_epoch() -> None:
    driver = staged()
    assert driver.hears(NewView(view=view(3, 5, 1, 2), contributed=held(5))) == [
        InstallStaged(key=key(3, 4), held=held(5), final=False),
    ]


@pytest.mark.parametrize("is_excused", [True, False], ids=["excused", "member again"])
def test_missed_commit_with_its_work_is_learnt_from_a_view_that_is_several_commits_further(is_excused: bool) -> None:
    driver = staged()
    theirs = view(5, 9, 2) if is_excused else view(5, 9, 1, 2)
    driver.hears(NewView(view=theirs, contributed=held(5), excused=(ref(1),) if is_excused else ()))
    ordered = driver.ordered()
    assert ordered[0] == InstallStaged(key=key(3, 4), held=held(5), final=False)
    assert CatchUp(target=held(9), donors=(member(2),)) == ordered[-1]
    assert driver.machine.held == held(5)
    assert driver.machine.phase is (Phase.EXCUSED if is_excused else Phase.SYNCING)
    assert driver.machine.is_standing, "it has lost nothing"


def test_an_excused_member_that_has_staged_what_the_others_committed_without_its_work_carries_it_over() -> None:
    driver = staged()
    driver.hears(NewView(view=view(5, 5, 2), contributed=held(3), excused=(ref(1),)))
    assert not any(isinstance(effect, InstallStaged) for effect in driver.ordered())
    assert driver.ordered()[-1] == CatchUp(target=held(5), donors=(member(2),))
    driver.feed(CaughtUp(held=held(5)))
    assert CarryOver(outer_step=OuterStep(4), held=held(5)) in driver.ordered()


def test_member_whose_work_was_committed_with_another_result_learns_so_from_a_later_view() -> None:
    driver = staged()
    driver.hears(NewView(view=view(5, 9, 2), contributed=held(5, kind=9), excused=(ref(1),)))
    reason = "outer step 5 was committed with another result than this peer's"
    assert driver.ordered()[:2] == [AbortExchange(key=key(3, 4)), BecomeLearner(reason=reason)]
    assert driver.machine.phase is Phase.LEARNING


def test_overruled_member_stops_training_and_fetches_what_the_others_have() -> None:
    driver = staged()
    driver.hears(commit(3, 4, kind=9))
    kinds = [type(effect) for effect in driver.ordered()]
    assert kinds == [AbortExchange, BecomeLearner, CatchUp]
    assert driver.machine.phase is Phase.SYNCING


@pytest.mark.parametrize(("told_by", "differs"), [(None, False), (ref(3).peer_id, False), (None, True)])
def test_failure_is_reported_with_who_found_it_and_whether_plans_differ(told_by: PeerId | None, differs: bool) -> None:
    """A member that repeats what another one has told is no second witness."""
    driver = active()
    driver.feed(payload(4))
    suspects = (ref(2).peer_id,)
    driver.feed(ExchangeFailed(key=key(3, 4), suspects=suspects, cause="lost", told_by=told_by, differs=differs))
    report = RoundFailed(key=key(3, 4), suspects=suspects, cause="lost", told_by=told_by, differs=differs)
    assert report in driver.said()


def test_failure_is_reported_until_there_is_a_new_view() -> None:
    driver = active()
    driver.feed(payload(4))
    driver.feed(ExchangeFailed(key=key(3, 4), suspects=(ref(2).peer_id,), cause="no byte moved"))
    report = RoundFailed(key=key(3, 4), suspects=(ref(2).peer_id,), cause="no byte moved")
    assert driver.said() == [report]
    driver.now = 1.0
    driver.feed(Tick())
    assert report in driver.said()


def test_end_of_an_aborted_exchange_is_ignored() -> None:
    driver = active(4, 3, 5)
    driver.feed(payload(4))
    driver.hears(NewView(view=view(4, 4, 1, 2)))
    assert driver.feed(ExchangeDone(key=key(3, 4), digest=held(5).digest)) == []
    assert driver.machine.counters["old_exchange"] == 1


# ------------------------------------------------------------------------ eviction


def test_evicted_member_forgets_its_payload_and_joins_afresh_once() -> None:
    driver = active()
    driver.feed(payload(4))
    evicted = Evicted(epoch=Epoch(4), reason="silent")
    driver.hears(evicted)
    assert driver.ordered() == [AbortExchange(key=key(3, 4)), BecomeLearner(reason="silent")]
    assert driver.said() == [Join(epoch=Epoch(4), address="host1:1", manifest_digest=MANIFEST, held=held(4))]
    assert driver.hears(evicted) == [], "copies of it are answered by the timer alone"


def put_out() -> MemberDriver:
    """A member that has voted, and was put out before it heard what came of it."""
    driver = staged()
    driver.hears(Evicted(epoch=Epoch(4), reason="silent"))
    assert driver.ordered() == [BecomeLearner(reason="silent")], "what is staged is not aborted"
    return driver


def test_member_that_was_put_out_installs_what_it_has_staged_once_a_welcome_names_it() -> None:
    driver = put_out()
    driver.hears(Welcome(epoch=Epoch(4), target=held(5), donors=()))
    assert driver.ordered() == [InstallStaged(key=key(3, 4), held=held(5), final=False)]
    assert driver.said() == [Synced(held=held(5))], "nobody else may have it"
    mine = view(5, 5, 1)
    assert driver.hears(NewView(view=mine)) == [InstallView(view=mine), BecomeActive(view=mine)]


def test_member_that_was_put_out_installs_what_it_has_staged_once_its_commit_arrives_late() -> None:
    driver = put_out()
    late = commit(3, 4)
    driver.hears(late)
    position = late.certificate.position
    assert driver.ordered() == [InstallStaged(key=key(3, 4), held=held(5), final=False, position=position)]


def test_member_that_was_put_out_installs_what_it_has_staged_once_a_view_names_it() -> None:
    driver = put_out()
    driver.hears(Welcome(epoch=Epoch(4), target=held(4), donors=(member(2),)))
    assert driver.ordered() == [], "that it holds already"
    driver.hears(NewView(view=view(5, 5, 1, 2)))
    assert driver.ordered()[0] == InstallStaged(key=key(3, 4), held=held(5), final=False)


def test_member_that_was_put_out_gives_up_what_it_has_staged_when_another_state_is_named() -> None:
    driver = put_out()
    other = held(5, kind=9)
    driver.hears(Welcome(epoch=Epoch(4), target=other, donors=(member(2),)))
    assert driver.ordered() == [AbortExchange(key=key(3, 4)), CatchUp(target=other, donors=(member(2),))]


def test_member_that_was_put_out_gives_up_what_it_has_staged_when_the_next_round_begins_without_it() -> None:
    driver = put_out()
    mine = view(5, 4, 1, 2)
    driver.hears(NewView(view=mine))
    assert driver.ordered() == [AbortExchange(key=key(3, 4)), InstallView(view=mine), BecomeActive(view=mine)]


@pytest.mark.parametrize("epoch", [2, 3])
def test_eviction_from_before_the_current_view_is_ignored(epoch: int) -> None:
    driver = active(4, 3)
    assert driver.hears(Evicted(epoch=Epoch(epoch), reason="late")) == []


def test_view_without_this_peer_is_an_eviction() -> None:
    driver = active(4, 3)
    driver.hears(NewView(view=view(4, 4, 2)))
    assert driver.machine.phase is Phase.JOINING


def test_reconnected_member_says_that_it_is_still_here_and_votes_again() -> None:
    driver = staged()
    driver.feed(Disconnected())
    driver.now = 0.2
    driver.feed(Connected())
    assert [type(item) for item in driver.said()] == [Join, Vote]


# ------------------------------------------------------------------------ endings


@pytest.mark.parametrize(("code", "reason"), [(5, "manifest"), (7, "lost"), (9, "integrity")])
def test_refusal_ends_the_peer_with_the_code_it_was_told(code: int, reason: str) -> None:
    driver = active()
    assert driver.hears(Refused(code=code, reason=reason)) == [Finish(code=code, reason=reason)]
    assert driver.feed(Tick()) == []
    assert driver.machine.next_deadline() is None


def test_final_commit_is_installed_and_the_peer_takes_its_leave() -> None:
    driver = staged()
    last = commit(3, 4, final=True).certificate
    driver.hears(Commit(certificate=last))
    assert driver.ordered() == [InstallStaged(key=key(3, 4), held=held(5), final=True, position=last.position)]
    assert driver.said() == [Leave(now=True)]
    driver.hears(Goodbye(outer_step=OuterStep(5)))
    assert driver.ordered() == [Finish(code=0, reason="the run is complete")]


def test_goodbye_that_never_comes_does_not_keep_the_peer() -> None:
    driver = staged()
    driver.hears(commit(3, 4, final=True))
    driver.now = 10.0
    driver.feed(Tick())
    assert driver.ordered() == [Finish(code=0, reason="the run is complete")]


def test_leaver_waits_for_the_boundary_without_limit_and_ends_with_code_20() -> None:
    driver = active()
    driver.feed(LeaveRequested(now=False))
    assert driver.said() == [Leave(held=driver.machine.held, address="host1:1")]
    driver.now = 500.0
    driver.feed(Tick())
    assert driver.machine.phase is Phase.ACTIVE
    driver.hears(Goodbye(outer_step=OuterStep(4), held=driver.machine.held))
    assert driver.ordered() == [Finish(code=20, reason="left at outer step 4")]


@pytest.mark.parametrize("then", [None, held(3)])
def test_goodbye_to_who_held_another_state_is_not_for_this_peer_unless_it_wants_to_go_at_once(
    then: Held | None,
) -> None:
    """It would take the only copy along (seeds 4889 and 6667 of the simulator)."""
    driver = active()
    driver.feed(LeaveRequested(now=False))
    driver.hears(Goodbye(outer_step=OuterStep(4), held=then))
    assert driver.machine.phase is Phase.ACTIVE
    driver.feed(LeaveRequested(now=True))
    driver.ordered()
    driver.hears(Goodbye(outer_step=OuterStep(4), held=then))
    assert driver.ordered() == [Finish(code=20, reason="left at outer step 4")]


def test_goodbye_that_nobody_asked_for_is_ignored() -> None:
    driver = active()
    assert driver.hears(Goodbye(outer_step=OuterStep(5))) == []


def test_evicted_leaver_does_not_join_again() -> None:
    driver = active()
    driver.feed(LeaveRequested(now=False))
    driver.hears(Evicted(epoch=Epoch(4), reason="silent"))
    assert driver.said() == [Leave(held=driver.machine.held, address="host1:1")]


def test_coordinator_that_cannot_be_reached_for_long_ends_the_peer_with_code_4() -> None:
    driver = active()
    driver.feed(Disconnected())
    driver.now = 600.0
    driver.feed(Tick())
    assert [effect.code for effect in driver.ordered() if isinstance(effect, Finish)] == [4]


# ------------------------------------------------------------------------ leases


def test_one_request_for_leases_at_a_time_and_the_next_for_all_that_was_wanted_since() -> None:
    driver = active()
    driver.feed(LeasesWanted(num_samples=10))
    assert driver.said() == [LeaseRequest(epoch=Epoch(3), serial=1, num_samples=10)]
    driver.feed(LeasesWanted(num_samples=3))
    driver.feed(LeasesWanted(num_samples=4))
    assert driver.effects == []
    driver.hears(LeaseGrant(serial=1, ranges=(IndexRange(0, 10),)))
    assert driver.ordered() == [TakeLeases(ranges=(IndexRange(0, 10),))]
    assert driver.said() == [LeaseRequest(epoch=Epoch(3), serial=2, num_samples=7)]


def test_a_late_member_that_waits_for_samples_asks_again_as_soon_as_it_is_a_member() -> None:
    driver = active()
    driver.feed(LeasesWanted(num_samples=10))
    driver.hears(NewView(view=view(4, 4, 2), excused=(ref(1),)))
    assert not driver.said()
    driver.hears(NewView(view=view(5, 4, 1, 2)))
    assert driver.said() == [LeaseRequest(epoch=Epoch(3), serial=1, num_samples=10)]


def test_grant_of_a_lost_membership_is_ignored() -> None:
    driver = active()
    driver.feed(LeasesWanted(num_samples=10))
    driver.hears(Evicted(epoch=Epoch(4), reason="silent"))
    assert driver.hears(LeaseGrant(serial=1, ranges=(IndexRange(0, 10),))) == []


def test_trainer_counts_as_waiting_only_until_it_has_its_leases() -> None:
    driver = active()
    driver.feed(LeasesWanted(num_samples=10))
    driver.feed(Progressed(progress=1, blocked=True))
    driver.hears(LeaseGrant(serial=1, ranges=(IndexRange(0, 10),)))
    driver.now = 1.0
    driver.feed(Tick())
    beats = [item for item in driver.said() if isinstance(item, Heartbeat)]
    assert [beat.blocked for beat in beats] == [False]

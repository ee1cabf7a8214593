# SPDX-License-Identifier: Apache-2.0
"""The test of the tests: broken variants of the protocol, each of which the simulator has to catch.

Every mutant is the real thing with one rule taken out, by subclassing or patching from here. Production code has no
flag for any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.elastic.core.events import CoordinatorEffect, Persist, SendToPeer
from isthmus.elastic.shell.alarm import HeldClock
from tests.simulation.broken_courses import (
    BeginsWithAllLanded,
    ConsumesAgain,
    ConsumesWhatIsOut,
    CountsWhatItMissed,
    EmitsFromWhatIsLive,
    FollowsTwice,
    ForgetsWhatItOwes,
    HandsInAhead,
    HandsInTwice,
    HurriesPastWhatIsDue,
    LandsBeforeItEmits,
    LandsMissedStepsAtOnce,
    LandsMissedStepsInTheirTime,
    LandsOutOfOrder,
    OwesToWhatIsOut,
    RemembersItsFormerLife,
    RemembersWhatItMissed,
    TrainsAfterTheLast,
    TrainsPastWhatIsDue,
)
from tests.simulation.broken_members import (
    ChangesItsWeight,
    CountsBytesAsWork,
    ForgetsItsPayload,
    ForgetsLateWork,
    InstallsWithoutCommit,
    OpenGate,
    SaysTooMuch,
)
from tests.simulation.broken_reasons import (
    AdmitsTheAbsent,
    BelievesInTheLostRun,
    DropsWhoFetches,
    DropsWhoIsAccused,
    ExcusesTooEarly,
    HaltsForOldSplits,
    KeepsTheIdle,
    LeavesItToTheAbsent,
    NeverGoesByItself,
    PausesLongerAndLonger,
    RemembersEveryStart,
)
from tests.simulation.broken_rounds import (
    AccusesAllOut,
    BelievesEveryWeight,
    BelievesOneVoice,
    BelievesTheAccuser,
    ComparesNoSums,
    ComparesNoWeights,
    CountsEveryPart,
    CountsVotesAfterFailures,
    CountsVotesOfAnyEpoch,
    ForgetsToSayGoodbye,
    ForgivesForEver,
    GoesOnWithNewcomers,
    GrantsEveryRepeat,
    GrantsEverything,
    HasUnboundedGrace,
    HearsNoRoot,
    JudgesNobodyWithoutWork,
    JudgesTheFirstLikeTheRest,
    NeedsOnlyOne,
    RecordsOtherWeights,
    ReturnsConsumedLeases,
    TakesTokensForWeights,
    TakesUnsignedVotes,
    TrustsHeartbeats,
    VotesWithoutDigest,
    WaitsForTheFirstVote,
    WaitsForTheVoteless,
)
from tests.simulation.broken_runs import (
    AnswersNoStranger,
    BeginsAgainAlone,
    BlamesAroundHubs,
    ChecksNoCertificate,
    CountsLearnersEarly,
    ForgetsEpochs,
    ForgetsWhoWasLate,
    HearsOlderStarts,
    KeepsItsFounder,
    LeavesWithTheState,
    LetsBackWhoWasPutOut,
    LetsLearnersChase,
    MeetsNobody,
    PausesNobody,
    RebuildsFromTheFirst,
    RemindsNobody,
    RollsBackAtOnce,
    RollsBackTooFar,
    RollsBackWithMembers,
    TakesAllForHolders,
    TellsNoOlderStart,
    WelcomesTheUnaware,
)
from tests.simulation.broken_snapshots import with_the_newest_commit_alone, without
from tests.simulation.parts import Parts


def send_first(effects: Sequence[CoordinatorEffect]) -> Sequence[CoordinatorEffect]:
    """Tells everybody, then writes it down."""
    sends = [effect for effect in effects if isinstance(effect, SendToPeer)]
    return [*sends, *(effect for effect in effects if isinstance(effect, Persist))]


def hold_nothing(time: HeldClock) -> None:
    """The machine's time goes on while the store is at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Which rule is missing, and the machines without it."""

    what: str
    parts: Parts


MUTANTS: dict[str, Mutant] = {
    "state_taken_away": Mutant(
        what="the last holder of the state leaves in order while others still need it",
        parts=Parts(coordinator=LeavesWithTheState),
    ),
    "vote_unsigned": Mutant(
        what="the coordinator counts a vote that its sender has not signed",
        parts=Parts(coordinator=TakesUnsignedVotes),
    ),
    "no_commit_round": Mutant(
        what="a member installs what it has staged without waiting for the commit",
        parts=Parts(member=InstallsWithoutCommit),
    ),
    "words_unbounded": Mutant(
        what="a member says more than its listener takes",
        parts=Parts(member=SaysTooMuch),
    ),
    "no_epoch_fence": Mutant(
        what="chunks of abandoned rounds count in the running one",
        parts=Parts(gate=OpenGate),
    ),
    "vote_of_any_epoch": Mutant(
        what="a vote for an abandoned attempt counts for the current one",
        parts=Parts(coordinator=CountsVotesOfAnyEpoch),
    ),
    "send_before_persist": Mutant(
        what="the coordinator tells its decisions before they are durable",
        parts=Parts(arrange=send_first),
    ),
    "vote_without_digest": Mutant(
        what="the coordinator commits when all have voted, whatever for",
        parts=Parts(coordinator=VotesWithoutDigest),
    ),
    "learner_counted_early": Mutant(
        what="learners become members before they have caught up",
        parts=Parts(coordinator=CountsLearnersEarly),
    ),
    "learner_chases": Mutant(
        what="learners are admitted only with the state that the boundary itself has made",
        parts=Parts(coordinator=LetsLearnersChase),
    ),
    "lease_returned_twice": Mutant(
        what="samples that a commit consumed return when their owner is gone",
        parts=Parts(coordinator=ReturnsConsumedLeases),
    ),
    "weight_beyond_leases": Mutant(
        what="a member weighs whatever it says",
        parts=Parts(coordinator=BelievesEveryWeight),
    ),
    "sums_without_work": Mutant(
        what="a member whose part weighs nothing gives all the others a false sum",
        parts=Parts(coordinator=JudgesNobodyWithoutWork),
    ),
    "roots_not_heard": Mutant(
        what="a large part in one member's slice is taken for that member's doing",
        parts=Parts(coordinator=HearsNoRoot),
    ),
    "any_size": Mutant(
        what="parts count however large their numbers are",
        parts=Parts(coordinator=CountsEveryPart),
    ),
    "weights_not_compared": Mutant(
        what="nobody looks whether all members have counted with the same weights",
        parts=Parts(coordinator=ComparesNoWeights),
    ),
    "sums_not_compared": Mutant(
        what="nobody looks whether a member gives the same sums to all",
        parts=Parts(coordinator=ComparesNoSums),
    ),
    "one_voice_is_enough": Mutant(
        what="who is pointed at by a single member has lied",
        parts=Parts(coordinator=BelievesOneVoice),
    ),
    "first_sizes_void": Mutant(
        what="what a member has sent while nothing was usual is not its own",
        parts=Parts(coordinator=JudgesTheFirstLikeTheRest),
    ),
    "deviants_for_ever": Mutant(
        what="who deviates in every round is never put out for good",
        parts=Parts(coordinator=ForgivesForEver),
    ),
    "struck_stay": Mutant(
        what="who had its strikes stays if the coordinator dies before it says so",
        parts=Parts(coordinator=ForgetsToSayGoodbye),
    ),
    "stranger_not_answered": Mutant(
        what="whoever was dropped is never told",
        parts=Parts(coordinator=AnswersNoStranger),
    ),
    "heartbeat_is_life": Mutant(
        what="a member that makes no progress is kept as long as its heart beats",
        parts=Parts(coordinator=TrustsHeartbeats),
    ),
    "voteless_awaited": Mutant(
        what="a member that never votes is awaited as long as its heart beats",
        parts=Parts(coordinator=WaitsForTheVoteless),
    ),
    "few_votes_never_enough": Mutant(
        what="where most do not vote, or the only member, nobody is ever given up",
        parts=Parts(coordinator=WaitsForTheFirstVote),
    ),
    "accuser_believed": Mutant(
        what="who is accused goes, whoever says it",
        parts=Parts(coordinator=BelievesTheAccuser),
    ),
    "accused_out": Mutant(
        what="accusations alone may put out more than half of the last commit's members",
        parts=Parts(coordinator=AccusesAllOut),
    ),
    "newcomers_alone": Mutant(
        what="a round goes on with newcomers alone, whom nobody may reach",
        parts=Parts(coordinator=GoesOnWithNewcomers),
    ),
    "older_start_not_told": Mutant(
        what="an older start of a copied folder is never told of the newer one",
        parts=Parts(coordinator=TellsNoOlderStart),
    ),
    "older_start_heard": Mutant(
        what="what an older start of a peer says counts",
        parts=Parts(coordinator=HearsOlderStarts),
    ),
    "unaware_welcomed": Mutant(
        what="a former member becomes a learner without having heard that it was dropped",
        parts=Parts(coordinator=WelcomesTheUnaware),
    ),
    "grace_unbounded": Mutant(
        what="a round waits for the late as long as they live",
        parts=Parts(coordinator=HasUnboundedGrace),
    ),
    "late_work_lost": Mutant(
        what="work that came too late for its round is thrown away",
        parts=Parts(member=ForgetsLateWork),
    ),
    "bytes_are_work": Mutant(
        what="an excused peer whose trainer hangs is a member again, because it follows the commits",
        parts=Parts(member=CountsBytesAsWork),
    ),
    "payload_forgotten": Mutant(
        what="a member drops its payload when the view changes",
        parts=Parts(member=ForgetsItsPayload),
    ),
    "certificate_not_checked": Mutant(
        what="a lost journal is made anew from certificates whose seal nobody has looked at",
        parts=Parts(coordinator=ChecksNoCertificate),
    ),
    "first_certificate_taken": Mutant(
        what="a lost journal is made anew from the first certificate that comes, not the newest",
        parts=Parts(coordinator=RebuildsFromTheFirst),
    ),
    "all_hold_after_restart": Mutant(
        what="a restarted coordinator takes every member for a holder of the newest state",
        parts=Parts(coordinator=TakesAllForHolders),
    ),
    "excused_forgotten": Mutant(
        what="a restarted coordinator takes who was excused for a peer that shows progress",
        parts=Parts(coordinator=ForgetsWhoWasLate),
    ),
    "tokens_for_weights": Mutant(
        what="a commit records how many tokens were trained on, and not the weight",
        parts=Parts(coordinator=TakesTokensForWeights),
    ),
    "other_weight_recorded": Mutant(
        what="a commit records another weight than was voted",
        parts=Parts(coordinator=RecordsOtherWeights),
    ),
    "founder_kept": Mutant(
        what="a founder that hangs is never replaced",
        parts=Parts(coordinator=KeepsItsFounder),
    ),
    "no_reminder": Mutant(
        what="who is put out is not told of the commit that it voted for",
        parts=Parts(coordinator=RemindsNobody),
    ),
    "lease_granted_twice": Mutant(
        what="a repeated request is granted again",
        parts=Parts(coordinator=GrantsEveryRepeat),
    ),
    "leases_without_bound": Mutant(
        what="a peer is given as many samples as it asks for",
        parts=Parts(coordinator=GrantsEverything),
    ),
    "weight_changes": Mutant(
        what="a payload is exchanged with another weight at the second try",
        parts=Parts(member=ChangesItsWeight),
    ),
    "time_goes_on": Mutant(
        what="a store that is away costs peers their membership",
        parts=Parts(hold=hold_nothing, release=hold_nothing),
    ),
    "store_without_fence": Mutant(
        what="a coordinator that another one has replaced goes on writing",
        parts=Parts(fences=False),
    ),
    "put_out_let_back": Mutant(
        what="whoever was put out joins again as the same start",
        parts=Parts(coordinator=LetsBackWhoWasPutOut),
    ),
    "vote_after_failure": Mutant(
        what="who has said that it cannot finish a round votes on it",
        parts=Parts(coordinator=CountsVotesAfterFailures),
    ),
    "no_links": Mutant(
        what="a learner becomes a member whoever has a link with it",
        parts=Parts(coordinator=MeetsNobody),
    ),
    "blames_around_hubs": Mutant(
        what="who is left without a link to the rest does not count when members are blamed",
        parts=Parts(coordinator=BlamesAroundHubs),
    ),
    "no_pauses": Mutant(
        what="who was awaited in vain again and again is a member at every boundary",
        parts=Parts(coordinator=PausesNobody),
    ),
    "begins_alone": Mutant(
        what="a run that went back begins with whoever comes first",
        parts=Parts(coordinator=BeginsAgainAlone),
    ),
    "goes_back_with_members": Mutant(
        what="a run goes back although it has members",
        parts=Parts(coordinator=RollsBackWithMembers),
    ),
    "one_goes_on": Mutant(
        what="a round goes on with however few have handed in",
        parts=Parts(coordinator=NeedsOnlyOne),
    ),
    "epoch_forgotten": Mutant(
        what="a restarted coordinator begins to count epochs anew",
        parts=Parts(coordinator=ForgetsEpochs),
    ),
    "snapshot_without_leases": Mutant(
        what="a snapshot of the journal forgets who owns which samples",
        parts=Parts(snapshot=without(owned=())),
    ),
    "snapshot_without_excused": Mutant(
        what="a snapshot of the journal forgets who is excused",
        parts=Parts(snapshot=without(excused=())),
    ),
    "snapshot_without_past": Mutant(
        what="a snapshot of the journal keeps the newest commit alone",
        parts=Parts(snapshot=with_the_newest_commit_alone),
    ),
    "snapshot_without_departed": Mutant(
        what="a snapshot of the journal forgets who was a member",
        parts=Parts(snapshot=without(departed=())),
    ),
    "rolled_back_too_far": Mutant(
        what="a run that goes back takes the oldest state that somebody holds, not the newest",
        parts=Parts(coordinator=RollsBackTooFar),
    ),
    "rolled_back_at_once": Mutant(
        what="a run goes back as soon as nobody is here who holds the committed state",
        parts=Parts(coordinator=RollsBackAtOnce),
    ),
    "lands_first": Mutant(
        what="a peer lands a step before it emits the one that is due then",
        parts=Parts(worker=LandsBeforeItEmits),
    ),
    "hands_in_ahead": Mutant(
        what="a step is handed in before the one before it is committed",
        parts=Parts(worker=HandsInAhead),
    ),
    "missed_counts": Mutant(
        what="a step that was committed without a peer's part counts as one with it",
        parts=Parts(worker=CountsWhatItMissed),
    ),
    "follows_twice": Mutant(
        what="a peer follows the others to one step twice",
        parts=Parts(worker=FollowsTwice),
    ),
    "trains_past_due": Mutant(
        what="a peer trains past the inner step at which a step is due",
        parts=Parts(worker=TrainsPastWhatIsDue),
    ),
    "hands_in_twice": Mutant(
        what="a step is handed in again while it is on its way",
        parts=Parts(worker=HandsInTwice),
    ),
    "lands_out_of_order": Mutant(
        what="the newest committed step lands first",
        parts=Parts(worker=LandsOutOfOrder),
    ),
    "never_rests": Mutant(
        what="a peer trains on while the last step is out",
        parts=Parts(worker=TrainsAfterTheLast),
    ),
    "hurries_past_due": Mutant(
        what="who hurries leaves out the landing of what is due",
        parts=Parts(worker=HurriesPastWhatIsDue),
    ),
    "missed_in_time": Mutant(
        what="a missed step lands when the ones before it are due, not at once",
        parts=Parts(worker=LandsMissedStepsInTheirTime),
    ),
    "missed_at_once": Mutant(
        what="a missed step lands before its fragments are given again",
        parts=Parts(worker=LandsMissedStepsAtOnce),
    ),
    "begins_landed": Mutant(
        what="who joins in the midst of a delay takes for landed what is due later",
        parts=Parts(worker=BeginsWithAllLanded),
    ),
    "owed_work_lost": Mutant(
        what="the work of a missed step is in no later payload",
        parts=Parts(worker=ForgetsWhatItOwes),
    ),
    "owed_too_early": Mutant(
        what="the work of a missed step weighs in a payload that was made before it was missed",
        parts=Parts(worker=OwesToWhatIsOut),
    ),
    "consumes_what_is_out": Mutant(
        what="a vote names the samples of an earlier payload of the fragment that is out",
        parts=Parts(worker=ConsumesWhatIsOut),
    ),
    "consumed_again": Mutant(
        what="a vote names samples that the commit before it has consumed",
        parts=Parts(worker=ConsumesAgain),
    ),
    "missed_remembered": Mutant(
        what="private state is settled by a missed step as by one that counted",
        parts=Parts(worker=RemembersWhatItMissed),
    ),
    "former_life": Mutant(
        what="private state goes on after the membership was lost",
        parts=Parts(worker=RemembersItsFormerLife),
    ),
    "emits_from_live": Mutant(
        what="a payload counts from a state that has not landed",
        parts=Parts(worker=EmitsFromWhatIsLive),
    ),
    "on_its_way_is_deaf": Mutant(
        what="a member that fetches the view's state is put out as one that does not hear",
        parts=Parts(coordinator=DropsWhoFetches),
    ),
    "accused_is_silent": Mutant(
        what="who is accused is dropped as silent, though it speaks",
        parts=Parts(coordinator=DropsWhoIsAccused),
    ),
    "grace_from_the_first": Mutant(
        what="the grace for the late begins with the first payload, not with the quorum",
        parts=Parts(coordinator=ExcusesTooEarly),
    ),
    "absent_hold": Mutant(
        what="a leaver takes the state away, since somebody who is gone has held it",
        parts=Parts(coordinator=LeavesItToTheAbsent),
    ),
    "splits_add_up": Mutant(
        what="votes without a majority are counted over all rounds, and end the run",
        parts=Parts(coordinator=HaltsForOldSplits),
    ),
    "pauses_add_up": Mutant(
        what="who is late now and then stays out for longer each time, whatever it gives between",
        parts=Parts(coordinator=PausesLongerAndLonger),
    ),
    "absent_admitted": Mutant(
        what="a learner becomes a member whose connection is lost",
        parts=Parts(coordinator=AdmitsTheAbsent),
    ),
    "idle_excused_kept": Mutant(
        what="an excused peer that stands still is never given up for that",
        parts=Parts(coordinator=KeepsTheIdle),
    ),
    "strikes_of_any_start": Mutant(
        what="a new start of a peer is sent home for what an older one did",
        parts=Parts(coordinator=RemembersEveryStart),
    ),
    "given_up_kept": Mutant(
        what="a peer goes on believing in a run that began again from nothing, and keeps no newer certificate",
        parts=Parts(member=BelievesInTheLostRun),
    ),
    "leaver_waits": Mutant(
        what="who wants to go, and has no coordinator, waits for one",
        parts=Parts(member=NeverGoesByItself),
    ),
}

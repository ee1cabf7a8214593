# SPDX-License-Identifier: Apache-2.0
"""What happens is a line of JSON, a figure, or both, and an audit needs nothing but the lines."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from isthmus.collective import LinkReport, RoundStats
from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.certificate import Certificate, Contributor
from isthmus.elastic.core.messages import (
    Bar,
    DataPosition,
    Held,
    IndexRange,
    Trust,
)
from isthmus.elastic.core.records import (
    BarRecord,
    CommitRecord,
    CommittedPart,
    Genesis,
    LeaseRecord,
    RebuildRecord,
    Record,
    ReleaseRecord,
    RollbackRecord,
    TicketRecord,
    ViewRecord,
)
from isthmus.elastic.core.run_state import RunState
from isthmus.elastic.observation import (
    BecameActive,
    BecameExcused,
    BecameLearner,
    CatchUpEnded,
    CatchUpStarted,
    CertificateKept,
    CoordinatorAsks,
    CoordinatorConnected,
    CoordinatorLost,
    Deviated,
    Event,
    Finished,
    Lied,
    Observation,
    PeerConnected,
    PeerDisconnected,
    RecordWritten,
    RoundAborted,
    RoundBroke,
    RoundCommitted,
    RoundStaged,
    RoundStarted,
    TrustHeard,
    ViewInstalled,
    WentBack,
    WorkCarriedOver,
    round_fields,
    state_fields,
    view_fields,
)
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.data.text import FoundText
from isthmus.trainer.engine.tally import Trained
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.errors import WorkerCrashed, WorkerDiverged
from isthmus.trainer.record import events
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.event_log import FILE_NAME, EventLog, read_events
from isthmus.trainer.record.events import event_of
from isthmus.trainer.record.figures import BLANK, Figures, as_of, fold
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.status import render_status
from isthmus.trainer.record.translation import crashed, exchanged, stepped, text_found, trained
from isthmus.trainer.workers.ipc import BackwardDone, StepDone, StepParts
from isthmus.trainer.workers.link import WorkerStalled
from isthmus.trainer.workers.process import WorkerDied

A = PeerRef(PeerId("a" * 16), Incarnation(1))
B = PeerRef(PeerId("b" * 16), Incarnation(2))
ADDRESS = "127.0.0.1:7000"
DIGEST = bytes(range(32))
HELD = Held(OuterStep(3), DIGEST)
KEY = RoundKey(Epoch(4), OuterStep(2), 0)
VIEW = View(
    Epoch(4),
    OuterStep(2),
    DIGEST,
    (Member(A.peer_id, A.incarnation, ADDRESS), Member(B.peer_id, B.incarnation, "127.0.0.1:7001")),
)
STATS = RoundStats(members=(A, B), weights=(6.0, 2.0), weight_sum=8.0, bytes_sent=100, bytes_received=200, seconds=0.25)
REPORT = RoundReport(
    view=VIEW,
    outer_step=3,
    digest=DIGEST,
    final=False,
    inner_step=9,
    num_tokens=60,
    loss=2.5,
    train_s=3.0,
    wait_s=1.0,
    work=Trained(step_s=2.5, step_tokens=60, data_s=0.25, passes_s=2.0, clip_s=0.125, update_s=0.125),
    position=DataPosition(12),
)
CERTIFICATE = Certificate(
    key=KEY,
    previous=bytes(32),
    digest=DIGEST,
    contributors=(Contributor(A.peer_id, A.incarnation, 6.0),),
    final=False,
    position=DataPosition(12),
    parent=bytes(32),
    seal=bytes(32),
)
BAR = Bar(B.peer_id, B.incarnation, 1)
SEEN = ViewInstalled(
    **view_fields(VIEW),
    incarnations=(A.incarnation, B.incarnation),
    addresses=tuple(member.address for member in VIEW.members),
)
ROUND = round_fields(KEY)
STARTED = events.Started(
    run_id="demo-01234567", address=ADDRESS, num_parameters=10, tokens_per_inner_step=20, samples_per_data_epoch=500
)
STORY: tuple[Observation, ...] = (
    CoordinatorConnected(address=ADDRESS),
    PeerConnected(of=B.peer_id, incarnation=2),
    Lied(of=B.peer_id, incarnation=2, outer_step=3, cause="b brings a certificate that nobody has made"),
    SEEN,
    BecameActive(**view_fields(VIEW)),
    CertificateKept(certificate=CERTIFICATE),
    CoordinatorAsks(testified=1, needed=2),
    WentBack(epoch=7, outer_step=2, cause="nobody holds outer step 3 any more"),
    TrustHeard(Trust(authorities=(b"",), barred=(BAR,))),
    RoundStarted(**ROUND, weight=6.0),
    RoundBroke(**ROUND, suspects=(B.peer_id,), cause="silent"),
    RoundAborted(**ROUND),
    RoundStaged(**ROUND, digest=DIGEST.hex(), seconds=0.5),
    RoundCommitted(**ROUND | state_fields(HELD), final=True, seconds=1.5),
    BecameExcused(**view_fields(VIEW)),
    WorkCarriedOver(outer_step=3),
    BecameLearner(cause="put out"),
    CatchUpStarted(outer_step=3, donors=1),
    CatchUpEnded(outer_step=None, digest=None, cause="no donor", bytes=0, seconds=0.1),
    CatchUpEnded(**state_fields(HELD), cause="", bytes=4096, seconds=0.1),
    Deviated(**state_fields(HELD), voted="00", damaged_chunks=0),
    PeerDisconnected(of=B.peer_id, incarnation=2, cause="ECONNRESET"),
    CoordinatorLost(cause="closed"),
    Finished(code=0, cause="the run is complete"),
)
CRASHES = (
    WorkerDied(1, -9, "", Path("worker-1.log"), memory_nbytes=5),
    WorkerStalled("step", [0], 30.0, "worker 0 hangs"),
    WorkerDiverged(3, "whole"),
)
OWN: tuple[Event, ...] = (
    STARTED,
    events.Workers(
        devices=("cpu",), precision="fp32", micro_batch=None, flops_per_token=None, peak_flops=None, seconds=1.0
    ),
    exchanged(KEY, STATS),
    trained(REPORT, 0.25),
    events.Evaluate(outer_step=3, loss=2.25),
    events.Checkpoint(outer_step=3, seconds=0.125),
    events.CheckpointFailed(cause="No space left on device"),
    events.CheckpointCopied(outer_step=3, seconds=0.5),
    events.CheckpointNotCopied(cause="Connection refused"),
    *map(crashed, CRASHES),
    events.OutOfMemory(micro_batch=2, cause="no room"),
    events.CoordinatorEnded(complete=True),
    events.Failed(code=10, cause="a worker is gone"),
)
RECORDS: tuple[Record, ...] = (
    Genesis(outer_step=OuterStep(0), digest=DIGEST, next_index=0),
    ViewRecord(view=VIEW, cause="b joined"),
    LeaseRecord(ref=B, serial=1, ranges=(IndexRange(0, 4), IndexRange(8, 10))),
    CommitRecord(
        key=KEY,
        outer_step=OuterStep(3),
        previous=bytes(32),
        digest=DIGEST,
        contributions=(
            CommittedPart(ref=A, weight=6.0, num_tokens=6, consumed=(IndexRange(0, 2),)),
            CommittedPart(ref=B, weight=2.0, num_tokens=2, consumed=()),
        ),
        final=False,
    ),
    ReleaseRecord(ref=B, epoch=Epoch(5), ranges=(IndexRange(8, 10),)),
    RebuildRecord(epoch=Epoch(9), certificate=CERTIFICATE, testified=(A,), insisted=False),
    RollbackRecord(epoch=Epoch(11), certificate=CERTIFICATE, given_up=OuterStep(5), holders=(A, B)),
    BarRecord(bar=BAR),
    TicketRecord(b"ticket 1", 2, B.peer_id, 1),
    RunState().snapshot(),
)


class Desk:
    """A chronicle with its file, its figures and its metrics."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.path = folder / FILE_NAME
        self.log = EventLog(self.path, A.peer_id, clock=lambda: self.now_s)
        self.chronicle = Chronicle(self.log, replace(BLANK, peer_id=A.peer_id, inner_steps_per_round=5))
        self.metrics = Metrics(lambda: self.chronicle.figures)

    def tell(self, *facts: Observation) -> None:
        for fact in facts:
            self.chronicle.observe(fact)

    def lines(self) -> list[dict[str, object]]:
        """Everything but the first line, which every log has."""
        return [json.loads(line) for line in self.path.read_text().splitlines()][1:]

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"isthmus_{name}")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.log.close()


def test_every_observation_is_one_line_in_the_order_of_the_story(desk: Desk) -> None:
    desk.tell(*STORY)
    assert [line["event"] for line in desk.lines()] == [
        "coordinator_connected", "peer_connected", "lied", "view", "join", "certificate", "fault", "went_back",
        "trust", "round_started", "fault", "round_aborted", "vote", "commit", "excused", "carried_over", "learner",
        "catch_up_started", "catch_up", "catch_up", "deviated", "fault", "fault", "leave",
    ]  # fmt: skip
    faults = ["journal_lost", "round_broke", "peer_disconnected", "coordinator_lost"]
    assert [line["kind"] for line in desk.lines() if line["event"] == "fault"] == faults


def test_every_record_of_the_journal_is_one_line(desk: Desk) -> None:
    desk.tell(*(RecordWritten(slot=slot, record=record) for slot, record in enumerate(RECORDS)))
    lines = desk.lines()
    assert [line["event"] for line in lines] == [
        "genesis", "view_decided", "lease", "commit_decided", "lease_returned", "rebuilt",
        "rolled_back", "put_out", "admitted", "snapshot",
    ]  # fmt: skip
    assert {type(record) for record in RECORDS} == set(Record.__args__)
    assert lines[2]["samples"] == 6
    assert lines[3]["members"] == [A.peer_id, B.peer_id]
    assert lines[3]["tokens"] == 8
    went_back = {"epoch": 11, "outer_step": 3, "digest": DIGEST.hex(), "given_up": 5}
    assert went_back | {"holders": [A.peer_id, B.peer_id]} == {name: lines[6][name] for name in (*went_back, "holders")}


def test_every_line_is_read_as_the_event_that_it_tells_of(desk: Desk) -> None:
    written = [desk.log.write(event) for event in (*(fact for fact in STORY if isinstance(fact, Event)), *OWN)]
    assert [event_of(line) for line in read_events(desk.path)][1:] == written
    assert event_of({"event": "of another version"}) is None
    assert event_of({"event": "fault", "kind": ["worker_died"]}) is None
    assert event_of({"event": "commit", "outer_step": "many"}) is None


def test_what_a_line_says_of_itself_has_no_name_that_every_line_has() -> None:
    def kinds(base: type[Event]) -> Iterator[type[Event]]:
        for kind in base.__subclasses__():
            yield from (kind, *kinds(kind))

    for kind in kinds(Event):
        own = [name for name in kind.__struct_fields__ if name not in Event.__struct_fields__]
        assert not {"event", "kind"} & set(own)


def test_replaying_the_file_gives_the_figures_that_were_shown_but_for_what_it_leaves_out(desk: Desk) -> None:
    """The named ones: of inner steps, of what is counted once a second, and what the operator asks for."""
    unfiled = {"phase", "inner_step", "num_inner_steps", "tokens", "train_loss", "is_leaving"}
    unfiled |= {"step", "refused", "state_served_bytes", "events_lost"}
    rates = {"uptime_s", "goodput", "tokens_per_s", "seconds_left"}
    of_no_event = {"inner_steps_per_round"}
    desk.tell(STORY[0], SEEN, BecameActive(**view_fields(VIEW)))
    for step in range(3, 9):
        desk.now_s += 7.0
        desk.tell(*(events.InnerStep(inner_step=2 * step + half, loss=3.0, tokens=10) for half in range(2)))
        desk.tell(events.HandedIn(), exchanged(KEY, STATS), trained(dataclasses.replace(REPORT, outer_step=step)))
    desk.tell(events.Counted(refused={"forged": 2}, state_served_bytes=9), events.LeaveAsked())
    desk.tell(*STORY, *OWN)
    replayed = BLANK
    for event in map(event_of, read_events(desk.path)):
        assert event is not None
        replayed = fold(replayed, event)
    shown, left_out = desk.chronicle.figures, {tag_of(kind) for kind in events.Unfiled.__subclasses__()}
    for name in set(Figures.__struct_fields__) - unfiled - rates - of_no_event - {"counts"}:
        assert getattr(replayed, name) == getattr(shown, name), name
    assert replayed.counts == {tag: number for tag, number in shown.counts.items() if tag not in left_out}
    assert replayed.num_commits == 7
    at_the_same_time = as_of(replayed, shown.uptime_s)
    assert at_the_same_time.goodput == shown.goodput
    assert shown.phase != BLANK.phase


def tag_of(kind: type[Event]) -> object:
    return kind.__struct_config__.tag


def test_a_run_that_went_back_is_warned_of(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = (record for record in RECORDS if isinstance(record, RollbackRecord))
    desk.tell(RecordWritten(slot=0, record=record))
    assert "rolled_back epoch=11 from=5 to=3" in caplog.text
    caplog.clear()
    to_beginning = RollbackRecord(epoch=Epoch(12), certificate=None, given_up=OuterStep(5), holders=(A,))
    desk.tell(RecordWritten(slot=1, record=to_beginning))
    assert "from=5 to=the beginning" in caplog.text
    assert [line["outer_step"] for line in desk.lines()] == [3, None]


def test_a_member_that_lied_or_was_overruled_is_named_in_the_events_the_log_and_the_figures(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    struck = ViewRecord(view=VIEW, cause=f"{B.peer_id} dropped: claims weight 9 where its leases allow 4", struck=(B,))
    overruled = CommitRecord(
        key=KEY,
        outer_step=OuterStep(3),
        previous=bytes(32),
        digest=DIGEST,
        contributions=(CommittedPart(A, 6.0, 60, ()), CommittedPart(B, 2.0, 20, (), agreed=False)),
        final=False,
    )
    for record in (struck, overruled):
        desk.tell(RecordWritten(slot=1, record=record))
    lies = [event for event in desk.lines() if event["event"] == "lied"]
    assert [event["of"] for event in lies] == [B.peer_id] * 2
    assert "claims weight 9" in str(lies[0]["cause"])
    assert desk.sample("lies_total") == 2.0
    assert caplog.text.count(f"member_lied of={B.peer_id}") == 2


def test_digests_are_there_in_full(desk: Desk) -> None:
    desk.tell(*STORY, *(RecordWritten(slot=0, record=record) for record in RECORDS))
    digests = [line["digest"] for line in desk.lines() if line.get("digest") is not None]
    assert digests == [DIGEST.hex()] * 9


def test_a_deviation_names_the_first_tensor_that_differs(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    place = {"tensor": "anchor", "start_bytes": 4096, "stop_bytes": 4099, "differing_chunks": 2}
    names = ("layers.0.wq", "layers.0.wk")
    desk.tell(Deviated(**state_fields(HELD), voted="00", damaged_chunks=1, parameters=names, **place))
    (line,) = desk.lines()
    told = place | {"parameters": list(names), "damaged_chunks": 1, "outer_step": HELD.outer_step}
    assert told == {name: line[name] for name in told}
    assert "tensor=anchor parameters=layers.0.wq,layers.0.wk bytes=4096-4099 chunks=2" in caplog.text
    assert "memory changed that nobody wrote to" in caplog.text


def test_a_commit_names_the_step_that_was_made_and_a_vote_the_one_it_starts_from(desk: Desk) -> None:
    desk.tell(RoundStaged(**ROUND, digest=DIGEST.hex(), seconds=0.5))
    desk.tell(RoundCommitted(**ROUND | state_fields(HELD), final=True, seconds=1.5))
    desk.tell(RecordWritten(slot=0, record=RECORDS[3]))
    assert [line["outer_step"] for line in desk.lines()] == [2, 3, 3]


def test_what_this_peer_does_is_told_with_its_figures(desk: Desk) -> None:
    desk.tell(*OWN)
    lines = {line["event"]: line for line in desk.lines() if line["event"] != "fault"}
    told = [
        *("started", "workers", "round", "trained", "evaluate"),
        *("checkpoint", "checkpoint_copied", "coordinator_ended", "failed"),
    ]
    assert list(lines) == told
    assert (lines["trained"]["step_s"], lines["trained"]["passes_s"], lines["trained"]["mfu"]) == (2.5, 2.0, 0.25)
    assert (lines["round"]["bytes_sent"], lines["round"]["bytes_received"]) == (100, 200)
    assert (lines["trained"]["loss"], lines["trained"]["tokens"], lines["trained"]["wait_s"]) == (2.5, 60, 1.0)
    faults = {line["kind"]: line for line in desk.lines() if line["event"] == "fault"}
    assert list(faults) == [
        "checkpoint_failed",
        "checkpoint_not_copied",
        "worker_died",
        "worker_hung",
        "values_not_finite",
        "out_of_memory",
    ]
    assert "No space left" in str(faults["checkpoint_failed"]["cause"])
    for name in ("checkpoint_failures_total", "checkpoints_total", "worker_deaths_total", "worker_hangs_total"):
        assert desk.sample(name) == 1.0
    assert (desk.sample("validation_loss"), desk.sample("train_loss")) == (2.25, 2.5)
    assert (desk.sample("wait_seconds_sum"), desk.sample("round_seconds_sum")) == (REPORT.wait_s, 0.0)


def test_a_round_that_goes_on_beside_the_training_takes_longer_than_the_workers_wait(desk: Desk) -> None:
    desk.tell(RoundCommitted(**ROUND | state_fields(HELD), final=False, seconds=4.0), trained(REPORT, None))
    assert (desk.sample("round_seconds_sum"), desk.sample("wait_seconds_sum")) == (4.0, REPORT.wait_s)


def test_what_is_not_a_crash_that_is_known_is_raised_again() -> None:
    with pytest.raises(WorkerCrashed, match="unheard of"):
        crashed(WorkerCrashed("unheard of"))


def test_a_coordinator_without_a_peer_tells_metrics_of_its_run_and_writes_no_lines_for_it(desk: Desk) -> None:
    desk.tell(events.Coordinated(epoch=3, outer_step=7, members=("a" * 16, "b" * 16)))
    assert [desk.sample(name) for name in ("epoch", "outer_step", "world_size")] == [3.0, 7.0, 2.0]
    assert desk.lines() == []


def test_inner_steps_are_figures_and_no_lines(desk: Desk) -> None:
    for step in range(5):
        desk.tell(events.InnerStep(inner_step=step + 1, loss=3.0, tokens=10))
    assert desk.lines() == []
    assert desk.sample("inner_steps_total") == 5.0
    assert desk.sample("tokens_total") == 50.0


def test_the_status_follows_the_story(desk: Desk) -> None:
    status = desk.chronicle.status
    assert status().phase == "starting"
    desk.tell(CatchUpEnded(**state_fields(HELD), cause="", bytes=1, seconds=0.1), SEEN)
    assert (desk.sample("outer_step"), desk.sample("world_size")) == (3.0, 2.0)
    desk.tell(BecameActive(**view_fields(VIEW)))
    assert (status().phase, status().outer_step) == ("training", 3)
    desk.tell(events.InnerStep(inner_step=10, loss=3.0, tokens=10), events.HandedIn())
    assert (status().phase, status().inner_step, status().train_loss) == ("exchanging", 1, 3.0)
    desk.tell(exchanged(KEY, STATS))
    desk.now_s += 10.0
    desk.tell(trained(REPORT, 0.25))
    now = status()
    assert (now.phase, now.outer_step, now.inner_step, now.train_loss) == ("training", 3, 0, 2.5)
    assert (now.sent_bytes, now.received_bytes, now.goodput) == (100, 200, pytest.approx(0.3))
    assert now.last_round is not None
    assert (now.last_round.bytes, now.last_round.num_members, now.last_round.seconds) == (300, 2, 4.0)
    desk.tell(BecameLearner(cause="put out"))
    assert (status().phase, desk.sample("evictions_total")) == ("learning", 1.0)


def test_the_end_is_told_ahead_at_the_pace_of_the_newest_commits(desk: Desk) -> None:
    desk.chronicle = Chronicle(desk.log, replace(BLANK, total_outer_steps=10))
    for step in range(1, 4):
        assert desk.chronicle.status().seconds_left is None or step == 3
        desk.now_s += 5.0
        desk.tell(trained(dataclasses.replace(REPORT, outer_step=step)))
    desk.now_s += 1.0
    assert desk.chronicle.status().seconds_left == pytest.approx(7 * 5.0 - 1.0)


WORKERS = events.Workers(
    devices=("cuda:0", "cuda:1"), precision="bf16", micro_batch=4, flops_per_token=100, peak_flops=8000.0, seconds=3.0
)
STEP = StepDone(
    serial=1,
    inner_step=9,
    loss=2.5,
    num_tokens=60,
    grad_norm=1.0,
    lr=1e-3,
    seconds=1.5,
    parts=StepParts(data_s=0.15, passes_s=1.2, clip_s=0.03, update_s=0.12),
)


def test_a_step_its_parts_and_its_share_of_the_peak_are_shown(desk: Desk) -> None:
    assert desk.chronicle.status().step is None
    assert desk.sample("step_seconds") is None
    desk.tell(WORKERS, stepped(9, STEP))
    step = desk.chronicle.status().step
    assert step is not None
    assert (step.seconds, step.tokens_per_s, step.mfu) == (1.5, 40.0, 0.5)
    assert (desk.sample("step_passes_seconds"), desk.sample("step_data_seconds")) == (1.2, 0.15)
    assert (desk.sample("mfu_ratio"), desk.sample("step_tokens_per_second")) == (0.5, 40.0)
    said = (
        "last inner step 1.5 s: 40 tokens a second, 50.0% of the devices' peak "
        "(passes 80%, clipping 2%, update 8%, waiting for text 10%)"
    )
    assert said in render_status(desk.chronicle.status()).splitlines()


def test_a_share_of_a_peak_that_nobody_knows_is_not_told(desk: Desk) -> None:
    desk.tell(replace(WORKERS, peak_flops=None), stepped(9, STEP))
    status = desk.chronicle.status()
    assert status.step is not None
    assert status.step.mfu is None
    assert desk.sample("mfu_ratio") is None
    assert "peak" not in render_status(status)


def test_half_a_step_leaves_the_figures_of_the_whole_one_before_it(desk: Desk) -> None:
    desk.tell(WORKERS, stepped(9, STEP), stepped(10, BackwardDone(serial=2, loss=2.0, num_tokens=60)))
    status = desk.chronicle.status()
    assert (status.train_loss, status.num_inner_steps) == (2.0, 2)
    assert status.step is not None
    assert status.step.seconds == 1.5


def test_workers_that_take_less_at_a_time_are_warned_of(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        desk.tell(events.OutOfMemory(micro_batch=4, cause="no room"))
    assert caplog.messages == ["out_of_memory micro_batch=4 cause='no room'; the workers begin anew"]
    (line,) = desk.lines()
    assert (line["event"], line["kind"], line["micro_batch"]) == ("fault", "out_of_memory", 4)


def test_a_peer_that_was_no_member_yet_is_not_counted_as_evicted(desk: Desk) -> None:
    desk.tell(BecameLearner(cause="welcomed as a learner"))
    assert desk.sample("evictions_total") == 0.0


def test_a_peer_that_leaves_says_so_until_it_is_gone(desk: Desk) -> None:
    desk.tell(BecameActive(**view_fields(VIEW)), events.LeaveAsked())
    desk.tell(events.InnerStep(inner_step=1, loss=3.0, tokens=10))
    assert desk.chronicle.status().phase == "leaving"


def test_a_member_is_the_coordinator_still_when_its_addresses_have_changed(desk: Desk) -> None:
    """Found: a founder that had got one more interface was no coordinator any more, in its own status."""
    addresses = ("10.55.0.1:7,127.0.0.1:7", "10.55.0.2:7,127.0.0.1:7")
    desk.tell(replace(SEEN, **view_fields(VIEW) | {"addresses": addresses}))
    desk.tell(CoordinatorConnected(address="192.0.2.2:7,10.55.0.1:7,127.0.0.1:7"))
    assert [member.is_coordinator for member in desk.chronicle.status().members] == [True, False]
    desk.tell(CoordinatorConnected(address="192.0.2.2:7,127.0.0.1:7"))
    assert [member.is_coordinator for member in desk.chronicle.status().members] == [False, False]


def test_the_status_marks_this_peer_the_coordinator_and_the_paths_between(desk: Desk) -> None:
    fields = view_fields(VIEW) | {"apart": (f"{A.peer_id} {B.peer_id}",)}
    desk.tell(replace(SEEN, **fields), CoordinatorConnected(address=ADDRESS))
    link = LinkReport(
        peer_id=B.peer_id,
        host="192.0.2.1",
        is_dialled=True,
        round_trip_s=0.02,
        num_streams=1,
        bytes_per_s=None,
        bytes_sent=0,
        bytes_received=0,
        bytes_sent_again=0,
    )
    status = desk.chronicle.status([link])
    assert status.coordinator == ADDRESS
    mine, other = status.members
    assert (mine.is_me, mine.is_coordinator, mine.is_apart, mine.host) == (True, True, False, None)
    assert (other.is_me, other.is_coordinator, other.is_apart) == (False, False, True)
    assert (other.host, other.is_dialled, other.round_trip_ms) == ("192.0.2.1", True, pytest.approx(20.0))
    assert status.peers_seen == 1


def test_totals_are_shown_as_they_are(desk: Desk) -> None:
    desk.tell(events.Counted(refused={"no hello in time": 2}, state_served_bytes=1000))
    desk.tell(events.Counted(refused={"no hello in time": 2, "refused": 1}, state_served_bytes=1500))
    assert desk.sample("state_served_bytes_total") == 1500.0
    assert desk.sample("events_lost_total") == 0.0
    for reason, expected in {"no hello in time": 2.0, "refused": 1.0}.items():
        value = desk.metrics.registry.get_sample_value("isthmus_refused_connections_total", {"reason": reason})
        assert value == expected


def test_the_line_that_people_read_of_the_text_says_what_it_is_and_where_from(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = np.zeros(3_150_000, dtype=np.uint8)
    corpus = Corpus.of(tokens, tokens, "Python 3.11.7's standard library")
    peers = (PeerId("a1b2000000000000"), PeerId("c3d4000000000000"))
    caplog.set_level(logging.INFO)
    desk.tell(
        text_found(FoundText(corpus=corpus, source="machine")),
        text_found(FoundText(corpus=corpus, source="copy")),
        text_found(FoundText(corpus=corpus, source="peers", peers=peers, fetched_nbytes=corpus.nbytes, seconds=0.41)),
        text_found(FoundText(corpus=corpus, source="peers", peers=peers[:1], fetched_nbytes=2_300_000, seconds=9.0)),
    )
    about = "text: 6.3 MB, Python 3.11.7's standard library, from"
    assert caplog.messages == [
        f"{about} this machine",
        f"{about} the copy of an earlier start",
        f"{about} peers a1b2, c3d4 in 0.4 s",
        f"{about} peers a1b2 in 9.0 s (4.0 MB of it were here)",
    ]

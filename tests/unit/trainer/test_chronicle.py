# SPDX-License-Identifier: Apache-2.0
"""What happens is a line of JSON, a figure, or both, and an audit needs nothing but the lines."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.collective import RoundStats
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
    Contribution,
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
    ElasticEvent,
    Finished,
    PeerConnected,
    PeerDisconnected,
    PeerExposed,
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
)
from isthmus.elastic.state.parity import Difference
from isthmus.trainer.config.settings import Config
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.errors import CheckpointFailed
from isthmus.trainer.record.chronicle import Chronicle
from isthmus.trainer.record.events import FILE_NAME, EventLog
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.scoreboard import Scoreboard

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
STORY: tuple[ElasticEvent, ...] = (
    CoordinatorConnected(ADDRESS),
    PeerConnected(ref=B),
    PeerExposed(ref=B, outer_step=3, cause="b brings a certificate that nobody has made"),
    ViewInstalled(VIEW),
    ViewInstalled(VIEW, "peer b cannot be reached"),
    BecameActive(VIEW),
    CertificateKept(certificate=CERTIFICATE),
    CoordinatorAsks(testified=1, needed=2),
    WentBack(epoch=7, outer_step=2, cause="nobody holds outer step 3 any more"),
    TrustHeard(Trust(authorities=(b"",), barred=(BAR,))),
    RoundStarted(key=KEY, weight=6.0),
    RoundBroke(key=KEY, suspects=(B.peer_id,), cause="silent"),
    RoundAborted(KEY),
    RoundStaged(key=KEY, digest=DIGEST, seconds=0.5),
    RoundCommitted(key=KEY, held=HELD, final=True, seconds=1.5),
    BecameExcused(VIEW),
    WorkCarriedOver(HELD),
    BecameLearner("put out"),
    CatchUpStarted(target=HELD, num_donors=1),
    CatchUpEnded(held=None, cause="no donor", nbytes=0, seconds=0.1),
    CatchUpEnded(held=HELD, cause="", nbytes=4096, seconds=0.1),
    Deviated(committed=HELD, voted=bytes(32), where=None, num_damaged=0),
    PeerDisconnected(ref=B, cause="ECONNRESET"),
    CoordinatorLost("closed"),
    Finished(code=0, reason="the run is complete"),
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
            Contribution(ref=A, weight=6.0, num_tokens=6, consumed=(IndexRange(0, 2),)),
            Contribution(ref=B, weight=2.0, num_tokens=2, consumed=()),
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
    """A chronicle with its log and its figures."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.metrics = Metrics(run_id="demo-01234567", peer_id=A.peer_id)
        self.board = Scoreboard(
            me=A,
            run_id="demo-01234567",
            config=Config(),
            metrics=self.metrics,
            clock=lambda: self.now_s,
            coordinator=None,
        )
        self.path = folder / FILE_NAME
        self.log = EventLog(self.path, A.peer_id)
        self.chronicle = Chronicle(self.log, self.board)

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
    for event in STORY:
        desk.chronicle.observe(event)
    lines = desk.lines()
    assert [line["event"] for line in lines] == [
        "coordinator_connected", "peer_connected", "lied", "view", "view", "join", "certificate", "fault", "went_back",
        "trust", "round_started", "fault", "round_aborted", "vote", "commit", "excused", "carried_over", "learner",
        "catch_up_started", "catch_up", "catch_up", "deviated", "fault", "fault", "leave",
    ]  # fmt: skip
    assert {type(event) for event in STORY} == set(ElasticEvent.__args__) - {RecordWritten}


def test_a_deviation_names_the_first_tensor_that_differs(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    where = Difference(tensor="anchor", start_nbytes=4096, stop_nbytes=4099, num_chunks=2)
    event = Deviated(committed=HELD, voted=bytes(32), where=where, num_damaged=1)
    desk.chronicle.deviated(event, ("layers.0.wq", "layers.0.wk"))
    (line,) = desk.lines()
    assert {name: line[name] for name in ("event", "tensor", "parameters", "differing_chunks", "damaged_chunks")} == {
        "event": "deviated",
        "tensor": "anchor",
        "parameters": ["layers.0.wq", "layers.0.wk"],
        "differing_chunks": 2,
        "damaged_chunks": 1,
    }
    assert (line["outer_step"], line["start_bytes"], line["stop_bytes"]) == (HELD.outer_step, 4096, 4099)
    assert "memory changed that nobody wrote to" in caplog.text


def test_every_record_of_the_journal_is_one_line(desk: Desk) -> None:
    for slot, record in enumerate(RECORDS):
        desk.chronicle.observe(RecordWritten(slot=slot, record=record))
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


def test_a_run_that_went_back_is_warned_of(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    (record,) = (record for record in RECORDS if isinstance(record, RollbackRecord))
    desk.chronicle.observe(RecordWritten(slot=0, record=record))
    assert "rolled_back epoch=11 from=5 to=3" in caplog.text
    caplog.clear()
    to_beginning = RollbackRecord(epoch=Epoch(12), certificate=None, given_up=OuterStep(5), holders=(A,))
    desk.chronicle.observe(RecordWritten(slot=1, record=to_beginning))
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
        contributions=(Contribution(A, 6.0, 60, ()), Contribution(B, 2.0, 20, (), agreed=False)),
        final=False,
    )
    for record in (struck, overruled):
        desk.chronicle.observe(RecordWritten(slot=1, record=record))
    lies = [event for event in desk.lines() if event["event"] == "lied"]
    assert [event["of"] for event in lies] == [B.peer_id] * 2
    assert "claims weight 9" in str(lies[0]["cause"])
    assert desk.sample("lies_total") == 2.0
    assert caplog.text.count(f"member_lied of={B.peer_id}") == 2


def test_digests_are_there_in_full(desk: Desk) -> None:
    for event in (*STORY, *(RecordWritten(slot=0, record=record) for record in RECORDS)):
        desk.chronicle.observe(event)
    digests = [line["digest"] for line in desk.lines() if line.get("digest") is not None]
    assert digests == [DIGEST.hex()] * 9


def test_a_commit_names_the_step_that_was_made_and_a_vote_the_one_it_starts_from(desk: Desk) -> None:
    desk.chronicle.observe(RoundStaged(key=KEY, digest=DIGEST, seconds=0.5))
    desk.chronicle.observe(RoundCommitted(key=KEY, held=HELD, final=True, seconds=1.5))
    desk.chronicle.observe(RecordWritten(slot=0, record=RECORDS[3]))
    assert [line["outer_step"] for line in desk.lines()] == [2, 3, 3]


def test_what_this_peer_does_is_told_with_its_figures(desk: Desk) -> None:
    desk.chronicle.started(
        run_id="demo-01234567",
        address=ADDRESS,
        num_parameters=10,
        tokens_per_inner_step=20,
        samples_per_data_epoch=500,
    )
    desk.chronicle.exchanged(KEY, STATS)
    desk.chronicle.trained(REPORT)
    desk.chronicle.evaluated(3, 2.25)
    desk.chronicle.checkpoint_saved(3, 0.125)
    desk.chronicle.checkpoint_failed(CheckpointFailed(Path("step-3"), OSError(28, "No space left on device")))
    lines = {line["event"]: line for line in desk.lines()}
    assert list(lines) == ["started", "round", "trained", "evaluate", "checkpoint", "fault"]
    assert (lines["round"]["bytes_sent"], lines["round"]["bytes_received"]) == (100, 200)
    assert (lines["trained"]["loss"], lines["trained"]["tokens"], lines["trained"]["wait_s"]) == (2.5, 60, 1.0)
    assert "No space left" in str(lines["fault"]["cause"])
    assert desk.sample("checkpoint_failures_total") == 1.0
    assert desk.sample("checkpoints_total") == 1.0
    assert desk.sample("validation_loss") == 2.25


def test_inner_steps_are_figures_and_no_lines(desk: Desk) -> None:
    for step in range(5):
        desk.chronicle.inner_step(step + 1, 3.0, 10)
    assert desk.lines() == []
    assert desk.sample("inner_steps_total") == 5.0
    assert desk.sample("tokens_total") == 50.0


def test_the_status_follows_the_story(desk: Desk) -> None:
    board, chronicle = desk.board, desk.chronicle
    assert board.status(1).phase == "starting"
    chronicle.observe(CatchUpEnded(held=HELD, cause="", nbytes=1, seconds=0.1))
    chronicle.observe(ViewInstalled(VIEW))
    chronicle.observe(BecameActive(VIEW))
    assert (board.status(1).phase, board.status(1).outer_step) == ("training", 3)
    chronicle.inner_step(10, 3.0, 10)
    chronicle.handed_in()
    assert (board.status(1).phase, board.status(1).inner_step) == ("exchanging", 1)
    chronicle.exchanged(KEY, STATS)
    desk.now_s += 10.0
    chronicle.trained(REPORT)
    status = board.status(1)
    assert (status.phase, status.outer_step, status.inner_step, status.train_loss) == ("training", 3, 0, 2.5)
    assert (status.sent_bytes, status.received_bytes, status.goodput) == (100, 200, pytest.approx(0.3))
    assert status.last_round is not None
    assert (status.last_round.bytes, status.last_round.num_members) == (300, 2)
    chronicle.observe(BecameLearner("put out"))
    assert (board.status(1).phase, desk.sample("evictions_total")) == ("learning", 1.0)


def test_a_peer_that_was_no_member_yet_is_not_counted_as_evicted(desk: Desk) -> None:
    desk.chronicle.observe(BecameLearner("welcomed as a learner"))
    assert desk.sample("evictions_total") == 0.0


def test_a_peer_that_leaves_says_so_until_it_is_gone(desk: Desk) -> None:
    desk.chronicle.observe(BecameActive(VIEW))
    desk.board.is_leaving = True
    desk.chronicle.inner_step(1, 3.0, 10)
    assert desk.board.status(1).phase == "leaving"


def test_the_status_marks_this_peer_and_the_coordinator(desk: Desk) -> None:
    desk.chronicle.observe(ViewInstalled(VIEW))
    desk.board.coordinator = ADDRESS
    status = desk.board.status(1)
    assert status.coordinator == ADDRESS
    assert [(member.is_me, member.is_coordinator) for member in status.members] == [(True, True), (False, False)]


def test_totals_become_counters_that_only_grow_by_what_is_new(desk: Desk) -> None:
    desk.chronicle.counted(refused={"no hello in time": 2}, served_nbytes=1000)
    desk.chronicle.counted(refused={"no hello in time": 2, "refused": 1}, served_nbytes=1500)
    assert desk.sample("state_served_bytes_total") == 1500.0
    assert desk.sample("events_lost_total") == 0.0
    reasons = {"no hello in time": 2.0, "refused": 1.0}
    for reason, expected in reasons.items():
        value = desk.metrics.registry.get_sample_value("isthmus_refused_connections_total", {"reason": reason})
        assert value == expected

# SPDX-License-Identifier: Apache-2.0
"""The figures of one peer as they stand: what `status`, the metrics and the live line show.

Fed by chronicle.py with the same facts that go into the event log. It must not decide anything.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from isthmus.collective import LinkReport, RoundStats
from isthmus.collective.core.types import Member, PeerId, PeerRef, View
from isthmus.elastic.core.messages import Held
from isthmus.trainer.config.outer_method import pace_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.engine.training_loop import RoundReport
from isthmus.trainer.record.metrics import Metrics
from isthmus.trainer.record.status import MemberStatus, Phase, RoundStatus, Status

_PACE_COMMITS = 20


class Scoreboard:
    """Keeps count.

    Args:
        me: this start of this peer.
        run_id: of the run.
        config: of the run.
        metrics: for Prometheus.
        clock: monotonic seconds.
        coordinator: where the coordinator listens; None until that is known.
    """

    def __init__(
        self,
        *,
        me: PeerRef,
        run_id: str,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float],
        coordinator: str | None,
    ) -> None:
        self._me = me
        self._run_id = run_id
        self._config = config
        self._inner_steps_per_round = pace_of(config).longest_stretch
        self._metrics = metrics
        self._clock = clock
        self._started_at = clock()
        self._train_s = 0.0
        self._view: View | None = None
        self._outer_step = 0
        self._inner_step = 0
        self._inner_steps_of_round = 0
        self._tokens = 0
        self._num_commits = 0
        self._num_inner_steps = 0
        self._seen: set[PeerId] = set()
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_COMMITS)
        """When which outer step was committed, of the newest ones."""
        self._first_loss: float | None = None
        self._train_loss: float | None = None
        self._validation_loss: float | None = None
        self._last_exchange: RoundStats | None = None
        self._last_round: RoundStatus | None = None
        self._checkpoint: int | None = None
        self._sent = 0
        self._received = 0
        self._refused: dict[str, int] = {}
        self._num_events_lost = 0
        self._served_nbytes = 0
        self.phase: Phase = "starting"
        self.is_leaving = False
        self.coordinator = coordinator
        self.metrics_address: str | None = None

    # -------------------------------------------------------------------------------- facts

    def viewed(self, view: View) -> None:
        """A view is installed."""
        self._view = view
        self._seen.update(member.peer_id for member in view.members if member.ref != self._me)
        self._metrics.epoch.set(view.epoch)
        self._metrics.world_size.set(view.world_size)

    def became_member(self, *, is_member: bool) -> None:
        """This peer became an active member, or ceased to be one."""
        if not is_member and self.phase in ("training", "exchanging"):
            self._metrics.evictions.inc()
        self.phase = "training" if is_member else "learning"
        self._inner_steps_of_round = 0
        self._metrics.is_member.set(int(is_member))

    def caught_up(self, held: Held) -> None:
        """This learner holds a newer state."""
        self._outer_step = held.outer_step

    def lied(self) -> None:
        """As the coordinator: a member was overruled, or put out for what it said."""
        self._metrics.lies.inc()

    def inner_step(self, inner_step: int, loss: float | None, num_tokens: int) -> None:
        """One inner step is done."""
        self.phase = "training"
        self._inner_step = inner_step
        self._inner_steps_of_round += 1
        self._num_inner_steps += 1
        self._tokens += num_tokens
        if loss is not None:
            self._train_loss = loss
        self._metrics.inner_steps.inc()
        self._metrics.tokens.inc(num_tokens)

    def handed_in(self) -> None:
        """The payload of a round is made."""
        self.phase = "exchanging"

    def exchanged(self, stats: RoundStats) -> None:
        """A mean is here."""
        self._last_exchange = stats
        self._sent += stats.bytes_sent
        self._received += stats.bytes_received
        self._metrics.exchange_seconds.observe(stats.seconds)
        self._metrics.sent_bytes.inc(stats.bytes_sent)
        self._metrics.received_bytes.inc(stats.bytes_received)

    def aborted(self) -> None:
        """A round runs again in another view."""
        self._metrics.aborts.inc()

    def trained(self, report: RoundReport) -> None:
        """A round of this peer is committed."""
        self.phase = "training"
        self._outer_step = report.outer_step
        self._num_commits += 1
        self._pace.append((self._clock(), report.outer_step))
        self._inner_steps_of_round = 0
        self._train_s += report.train_s
        exchange = self._last_exchange
        self._last_round = RoundStatus(
            outer_step=report.outer_step,
            seconds=report.train_s + report.wait_s,
            exchange_seconds=exchange.seconds if exchange is not None else 0.0,
            bytes=exchange.bytes_sent + exchange.bytes_received if exchange is not None else 0,
            num_members=report.view.world_size,
            loss=report.loss,
        )
        if report.loss is not None:
            self._train_loss = report.loss
            self._first_loss = report.loss if self._first_loss is None else self._first_loss
            self._metrics.train_loss.set(report.loss)
        self._metrics.outer_step.set(report.outer_step)
        self._metrics.commits.inc()
        self._metrics.round_seconds.observe(report.wait_s)
        self._metrics.goodput_ratio.set(self._goodput())

    def evaluated(self, loss: float) -> None:
        """The anchor was judged on held-out text."""
        self._validation_loss = loss
        self._metrics.validation_loss.set(loss)

    def checkpoint_saved(self, outer_step: int, seconds: float) -> None:
        """A checkpoint is on the disk."""
        self._checkpoint = outer_step
        self._metrics.checkpoints.inc()
        self._metrics.checkpoint_seconds.observe(seconds)

    def checkpoint_failed(self) -> None:
        """A checkpoint could not be written."""
        self._metrics.checkpoint_failures.inc()

    def worker_died(self) -> None:
        """The workers are replaced, because one of them died."""
        self._metrics.worker_deaths.inc()

    def worker_hung(self) -> None:
        """The workers are replaced, because one of them hangs."""
        self._metrics.worker_hangs.inc()

    def counted(self, *, refused: Mapping[str, int], num_events_lost: int, served_nbytes: int) -> None:
        """So far: connections that were not let in, by reason; lines that were lost; bytes of state for learners."""
        for reason, count in refused.items():
            self._metrics.refused_connections.labels(reason=reason).inc(count - self._refused.get(reason, 0))
        self._metrics.events_lost.inc(num_events_lost - self._num_events_lost)
        self._metrics.state_bytes.inc(served_nbytes - self._served_nbytes)
        self._refused, self._num_events_lost, self._served_nbytes = dict(refused), num_events_lost, served_nbytes

    # -------------------------------------------------------------------------------- reading

    def status(self, pid: int, links: Sequence[LinkReport] = ()) -> Status:
        """What `isthmus status` tells. `links` are those with the members."""
        uptime_s = self._clock() - self._started_at
        return Status(
            run_id=self._run_id,
            peer_id=self._me.peer_id,
            incarnation=self._me.incarnation,
            pid=pid,
            phase="leaving" if self.is_leaving else self.phase,
            outer_step=self._outer_step,
            total_outer_steps=self._config.run.outer_steps,
            inner_step=min(self._inner_steps_of_round, self._inner_steps_per_round),
            inner_steps_per_round=self._inner_steps_per_round,
            epoch=self._view.epoch if self._view is not None else 0,
            members=self._members({link.peer_id: link for link in links}),
            coordinator=self.coordinator,
            num_commits=self._num_commits,
            num_inner_steps=self._num_inner_steps,
            peers_seen=len(self._seen),
            seconds_left=self._seconds_left(),
            first_loss=self._first_loss,
            train_loss=self._train_loss,
            validation_loss=self._validation_loss,
            tokens=self._tokens,
            tokens_per_s=self._tokens / uptime_s if uptime_s > 0 else None,
            goodput=self._goodput(),
            sent_bytes=self._sent,
            received_bytes=self._received,
            last_round=self._last_round,
            checkpoint_outer_step=self._checkpoint,
            metrics_address=self.metrics_address,
            uptime_s=uptime_s,
        )

    def _members(self, links: Mapping[PeerId, LinkReport]) -> tuple[MemberStatus, ...]:
        members = () if self._view is None else self._view.members
        return tuple(self._member(member, links.get(member.peer_id)) for member in members)

    def _member(self, member: Member, link: LinkReport | None) -> MemberStatus:
        has_path = link is not None and link.host != ""
        return MemberStatus(
            peer_id=member.peer_id,
            incarnation=member.incarnation,
            address=member.address,
            host=link.host if link is not None and has_path else None,
            is_dialled=link.is_dialled if link is not None and has_path else None,
            round_trip_ms=link.round_trip_s * 1e3 if link is not None and link.round_trip_s else None,
            is_apart=self._is_apart(member),
            is_me=member.ref == self._me,
            is_coordinator=member.address == self.coordinator,
        )

    def _is_apart(self, member: Member) -> bool:
        view = self._view
        ours, its = (None, None) if view is None else (view.rank_of(self._me.peer_id), view.rank_of(member.peer_id))
        return view is not None and ours is not None and its in view.apart_from(ours)

    def _goodput(self) -> float:
        uptime_s = self._clock() - self._started_at
        return min(1.0, self._train_s / uptime_s) if uptime_s > 0 else 0.0

    def _seconds_left(self) -> float | None:
        """Until the run's end at the pace of the newest commits; None before there are two."""
        if len(self._pace) < 2:
            return None
        (began, first), (ended, last) = self._pace[0], self._pace[-1]
        left_s = (self._config.run.outer_steps - last) * (ended - began) / max(1, last - first)
        return max(0.0, left_s - (self._clock() - ended))

# SPDX-License-Identifier: Apache-2.0
"""Making a lost journal anew from what the run's peers can prove.

Every peer keeps the certificate of the newest commit that it has heard of. A coordinator with an empty journal asks
for them and goes on from the newest one. Rules:

* Only genuine certificates of this run count, and only who brings one testifies: a peer without a memory cannot say
  that there was nothing newer.
* The newest certificate counts when more than half of the members that it names have testified, and everybody else has
  had time: also when all of them have, since they may all be of an old view, and be here before the newer ones. Fewer
  are enough only if the operator insists.
* The run goes on under an epoch that the lost journal cannot have reached, so that the members refuse whoever comes
  back with it. It is above every epoch that anybody has named, an older start of a peer and a leaver included: each of
  them may be told later how the run went on. What is named without a proof counts up to `MOST_AHEAD` beyond the newest
  certificate: epochs are finite, and one peer must not use them up with one word.
* A peer that leaves in order and holds a state is asked like all others. It stays until the journal is rebuilt, because
  perhaps nobody else holds that state (seed 87115).
* What was given to peers since that certificate is void: its leases are free again, payloads are forgotten. Nothing
  that a commit holds is lost with them, but up to one round of inner steps is.

What a lost disk can cost beyond that: a commit that nobody who testifies has heard of. Its members voted for it, but
a vote is no commit. If somebody who has heard of it comes later, it is told that this commit is no part of the run.
"""

from collections import deque
from dataclasses import dataclass

from isthmus.collective.core.types import Epoch, Instant, OuterStep, PeerId, PeerRef
from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.core.events import Expose, Resign
from isthmus.elastic.core.exit_codes import NO_STATE, REFUSED
from isthmus.elastic.core.messages import Goodbye, Held, Join, Leave, PeerMessage, Rebuilding, Refused
from isthmus.elastic.core.news import News
from isthmus.elastic.core.records import RebuildRecord
from isthmus.elastic.core.rendezvous import Rendezvous
from isthmus.elastic.core.turn import Turn

EPOCHS_A_REBUILD = 1 << 20
"""How far a rebuilt run's epochs begin behind the newest one that anybody has heard of. The lost journal may have known
newer ones and may go on if it comes back: this is a new view every second for 12 days. On the wire an epoch has 32
bits, which is room for 2000 rebuilds with their salts."""

MOST_AHEAD = 16 * EPOCHS_A_REBUILD
"""How far beyond what is proved an epoch may be that is only named: eight rebuilds, with their salts, that were lost
again before anybody had a commit of theirs. With a liar at each of them there is room for 200 rebuilds."""

MAX_EPOCH = (1 << 32) - 2 * EPOCHS_A_REBUILD
"""Nothing begins above it: then views have room, too."""

_MAX_NAMED = 8
"""So many different epochs of one peer's starts are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What one start of one peer says that it knows. The certificate is genuine."""

    ref: PeerRef
    held: Held | None
    certificate: Certificate | None


class Rebuild:
    """Collects Joins until they prove enough. Nobody has a session meanwhile."""

    def __init__(
        self, config: CoordinatorConfig, turn: Turn, news: News, rendezvous: Rendezvous, rule: RebuildRule
    ) -> None:
        self._config, self._turn, self._news, self._rendezvous = config, turn, news, rendezvous
        self._rule = rule
        self._answers: dict[PeerId, _Answer] = {}
        self._named_epochs: dict[PeerId, deque[Epoch]] = {}  # which of them count is known when the proofs are here
        self._newest: Certificate | None = None
        self._enough_since: Instant | None = None
        self._waiting_since: Instant | None = None

    # -------------------------------------------------------------------------------- facts

    def forgive(self, now: Instant) -> None:
        """The coordinator itself did not run: nobody could testify meanwhile."""
        if self._enough_since is not None:
            self._enough_since = now
        if self._waiting_since is not None:
            self._waiting_since = now

    def heard(self, sender: PeerRef, message: PeerMessage) -> None:
        """Somebody spoke. Whatever it was, it is asked what it holds."""
        if isinstance(message, Join):
            self._note_epoch(sender, message)
        known = self._answers.get(sender.peer_id)
        if known is not None and sender.incarnation < known.ref.incarnation:
            self._turn.counters["older_incarnation"] += 1
            return
        if isinstance(message, Leave) and (message.now or message.held is None):
            self._answers.pop(sender.peer_id, None)
            self._look()
            self._turn.send(sender, Goodbye(outer_step=OuterStep(0), held=message.held))
            return
        if isinstance(message, Join) and not self._take(sender, message):
            return
        named = self._named()
        self._turn.send(sender, Rebuilding(testified=len(self._witnesses(named)), needed=len(named) // 2 + 1))

    def _note_epoch(self, sender: PeerRef, join: Join) -> None:
        named = self._named_epochs
        if join.manifest_digest != self._config.manifest_digest or join.epoch > MAX_EPOCH:
            return
        if sender.peer_id not in named and len(named) < 2 * self._config.max_peers:  # leavers are no answers any more
            named[sender.peer_id] = deque(maxlen=_MAX_NAMED)
        if join.epoch not in named.get(sender.peer_id, (join.epoch,)):
            named[sender.peer_id].append(join.epoch)

    def _take(self, sender: PeerRef, join: Join) -> bool:
        """Note an answer. False if it is none and the peer was told."""
        reason = None
        if join.manifest_digest != self._config.manifest_digest:
            reason = "your run manifest differs from the run's"
        elif sender.peer_id not in self._answers and len(self._answers) >= self._config.max_peers:
            reason = f"the run is full: {self._config.max_peers} peers"
        elif join.epoch > MAX_EPOCH:
            reason = f"you have seen epoch {join.epoch}, which no run reaches"
        if reason is not None:
            self._turn.send(sender, Refused(code=REFUSED, reason=reason))
            return False
        certificate = join.certificate
        if certificate is not None and not self.is_genuine(certificate):
            self._turn.counters["forged_certificate"] += 1
            certificate = None
        self._answers[sender.peer_id] = _Answer(ref=sender, held=join.held, certificate=certificate)
        if self._waiting_since is None:
            self._waiting_since = self._turn.now
        self._look()
        return True

    def _look(self) -> None:
        """Which certificate is the newest now. Its members have their time from when it is."""
        known = [item.certificate for item in self._answers.values() if item.certificate is not None]
        newest = self.newest(known)
        if newest != self._newest:
            self._newest, self._enough_since = newest, None

    def is_genuine(self, certificate: Certificate) -> bool:
        """Whether it is one of this run, unchanged."""
        return certificate.key.epoch <= MAX_EPOCH and certificate.check(self._config.sealer)

    # -------------------------------------------------------------------------------- decision

    def settled(self) -> bool:
        """Decide, if what has been said is enough. True when the journal has begun anew and everybody is told."""
        now, config = self._turn.now, self._config
        named = self._named()
        witnesses = self._witnesses(named)
        is_majority = 2 * len(witnesses) > len(named)
        is_enough = is_majority or (self._rule is RebuildRule.INSIST and bool(self._answers))
        if not is_enough:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if self._enough_since is not None and now >= self._enough_since + config.rebuild_grace_s:
            self._begin(witnesses, insisted=not is_majority)
            return True
        if self._waiting_since is not None and now >= self._waiting_since + config.orphan_timeout_s:
            self._send_home(len(witnesses), len(named))
        return False

    def newest(self, certificates: list[Certificate]) -> Certificate | None:
        """Which of them the run goes on from."""
        return max(certificates, key=lambda item: (item.order, item.link), default=None)

    def deadlines(self) -> list[Instant]:
        """When to look again."""
        config, result = self._config, list[Instant]()
        if self._enough_since is not None:
            result.append(self._enough_since + config.rebuild_grace_s)
        if self._waiting_since is not None:
            result.append(self._waiting_since + config.orphan_timeout_s)
        return result

    def _named(self) -> set[PeerId]:
        return set() if self._newest is None else {item.peer_id for item in self._newest.contributors}

    def _witnesses(self, named: set[PeerId]) -> list[_Answer]:
        return [item for item in self._answers.values() if item.certificate is not None and item.ref.peer_id in named]

    def _begin(self, witnesses: list[_Answer], *, insisted: bool) -> None:
        newest = self._newest
        record = RebuildRecord(
            epoch=Epoch(self._highest_epoch() + EPOCHS_A_REBUILD + self._config.rebuild_salt),
            certificate=newest,
            testified=tuple(item.ref for item in witnesses),
            insisted=insisted,
        )
        self._turn.persist(record)
        holders = [item for item in self._answers.values() if newest is not None and item.held == newest.made]
        # A witness that does not hold the newest state yet may have it staged.
        self._rendezvous.call([item.ref.peer_id for item in (*witnesses, *holders)], self._turn.now)
        for item in self._answers.values():
            self._news.tell_rebuilt(item.ref)

    def _highest_epoch(self) -> int:
        """That anybody has proved, or has named without being far beyond that."""
        answers = self._answers.values()
        proved = max((item.certificate.key.epoch for item in answers if item.certificate is not None), default=Epoch(0))
        named = (epoch for epochs in self._named_epochs.values() for epoch in epochs)
        return max((proved, *(epoch for epoch in named if epoch <= proved + MOST_AHEAD)))

    def _send_home(self, num_witnesses: int, num_named: int) -> None:
        """Too few for too long: say so."""
        brought = f"{num_witnesses} of the {num_named} members of the newest certificate have brought one"
        if not num_named:
            brought = "nobody has brought a certificate of a commit"
        reason = f"the coordinator's journal is lost, and {brought}: start the others, or let its operator insist"
        for item in self._answers.values():
            self._turn.send(item.ref, Refused(code=NO_STATE, reason=reason))
        self._answers.clear()
        self._newest = self._enough_since = self._waiting_since = None


class Proofs:
    """What the certificates that peers bring prove of this journal: that it was lost, or that it is an old copy.

    Holds who was named as a liar.
    """

    def __init__(self, config: CoordinatorConfig, turn: Turn) -> None:
        self._config, self._state, self._turn = config, turn.state, turn
        self._exposed: deque[PeerRef] = deque(maxlen=config.max_peers)

    def is_lost(self, join: Join) -> bool:
        """A run that has a certificate has begun. So an empty journal is not a new run's: nobody may found it again."""
        state, certificate = self._state, join.certificate
        if state.committed is not None or state.rebuilt is not None or certificate is None:
            return False
        return join.manifest_digest == self._config.manifest_digest and certificate.check(self._config.sealer)

    def resigns(self, sender: PeerRef, join: Join) -> bool:
        """Whether the sender brings a commit that this journal does not hold, told by whoever has the real one.

        Then this coordinator goes. The members refuse the words of an old journal: they would wait at its coordinator
        for ever, and it for them.
        """
        state, certificate = self._state, join.certificate
        if certificate is None or join.manifest_digest != self._config.manifest_digest:
            return False
        if state.rebuilt is not None and certificate.key.epoch < state.rebuilt.epoch:
            return False  # of the lost journal, and given up
        if state.certificate is not None and certificate.order <= state.certificate.order:
            return False
        step = certificate.made.outer_step
        if not certificate.check(self._config.sealer):
            self._expose(sender, f"brings a certificate of outer step {step} that nobody has made")
            return False
        reason = (
            f"{sender.peer_id} proves outer step {step} of epoch {certificate.key.epoch}, this journal ends at "
            f"{state.outer_step} of epoch {state.epoch}: it is an old copy"
        )
        self._turn.order(Resign(reason=reason))
        return True

    def _expose(self, ref: PeerRef, cause: str) -> None:
        """Name a liar, each start of a peer once: it may say the same again every second."""
        self._turn.counters["forged_certificate"] += 1
        if ref not in self._exposed:
            self._exposed.append(ref)
            expose = Expose(ref=ref, outer_step=self._state.outer_step, cause=f"{ref.peer_id} {cause}")
            self._turn.order(expose)

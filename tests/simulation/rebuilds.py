# SPDX-License-Identifier: Apache-2.0
"""What every peer can prove, and what a coordinator without a journal may make of it: I1, I3.

The books are kept from what is told and what arrives. A rebuilt run begins with the newest commit that any of those who
testified has heard of; what was committed after it is given up, and nothing else is.
"""

from typing import TYPE_CHECKING

from isthmus.collective.core.types import OuterStep, PeerRef, RoundKey
from isthmus.elastic.core.certificate import Certificate, Contributor, ballot, encode_certificate, genesis_link
from isthmus.elastic.core.messages import (
    Commit,
    CoordinatorMessage,
    DataPosition,
    Evicted,
    Held,
    Join,
    Leave,
    NewView,
    PeerMessage,
    Rebuilt,
    Welcome,
)
from isthmus.elastic.core.records import CommitRecord, RebuildRecord, Record
from tests.keys import PeerKeys
from tests.simulation.work import consumed_by
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


def forge(certificate: Certificate, me: PeerRef, keys: PeerKeys) -> Certificate:
    """A liar's: it names a commit that never was, with all that its maker can sign.

    Of the others it has only the signatures under what they have voted for; so every other forgery is of a round in
    which it was alone.
    """
    key = RoundKey(certificate.key.epoch, OuterStep(certificate.key.outer_step + 7), certificate.key.fragment)
    previous, digest = certificate.digest, certificate.previous
    alone = Contributor(me.peer_id, me.incarnation, 1.0, keys.sign(ballot(key, previous, digest, me, 1.0)))
    others = tuple(item for item in certificate.contributors if item.peer_id != me.peer_id)
    return Certificate(
        key=key,
        previous=previous,
        digest=digest,
        contributors=(alone, *others) if key.outer_step % 2 else (alone,),
        final=False,
        position=certificate.position,
        parent=certificate.link,
        seal=keys.sign(certificate.link) if key.outer_step % 3 else certificate.seal,
    )


def _epoch_of(message: CoordinatorMessage) -> int:
    """The one that it names; 0 if it names none."""
    match message:
        case Commit(certificate=certificate):
            return certificate.key.epoch
        case NewView(view=view):
            return view.epoch
        case Welcome(epoch=epoch) | Evicted(epoch=epoch) | Rebuilt(epoch=epoch):
            return epoch
        case _:
            return 0


class Certificates:
    """The chain as it was told, and what each start of a peer has heard of it."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self._told: dict[RoundKey, Certificate] = {}
        self._records: dict[RoundKey, CommitRecord] = {}
        self._links = [b""]  # of the journal's commits, the genesis first
        self._brought: dict[PeerRef, Certificate] = {}  # to the coordinator's process that runs now
        self._epochs: dict[PeerRef, int] = {}  # the newest that each start has heard of

    def persisted(self, record: Record) -> None:
        match record:
            case CommitRecord():
                self._records[record.key] = record
            case RebuildRecord():
                self._rebuilt(record)
            case _:
                pass

    def told(self, message: CoordinatorMessage) -> None:
        """A certificate says what the journal says, always in the same bits, and names the one before it."""
        if not isinstance(message, Commit):
            return
        certificate = message.certificate
        known = self._told.get(certificate.key)
        if known is not None:
            same = known is certificate or encode_certificate(known) == encode_certificate(certificate)
            demand(same, "I3", f"the certificate of {certificate.key} has changed")
            return
        record = self._records.get(certificate.key)
        demand(record is not None, "I3", f"a certificate of {certificate.key}, which is not in the journal")
        assert record is not None
        weights = [(item.ref, item.weight) for item in record.contributions]
        demand(certificate.check(self._sim.keys), "I3", "a certificate without the run's seal")
        demand([(item.ref, item.weight) for item in certificate.contributors] == weights, "I2", "it names others")
        is_same = (certificate.previous, certificate.digest, certificate.final) == (
            record.previous,
            record.digest,
            record.final,
        )
        demand(is_same, "I1", f"the certificate of {certificate.key} is of another commit")
        self._check_parent(certificate)
        self._check_position(certificate)
        self._told[certificate.key] = certificate

    def _check_parent(self, certificate: Certificate) -> None:
        lineage = self._sim.checkers.history.lineage
        genesis, keys = lineage.genesis, [commit.key for commit in lineage.commits]
        place = keys.index(certificate.key)
        if place == 0:
            if genesis is not None and certificate.key.outer_step == genesis.outer_step:
                held = Held(genesis.outer_step, genesis.digest)
                position = DataPosition(genesis.next_index, genesis.returned)
                demand(certificate.parent == genesis_link(held, position), "I1", "the chain begins elsewhere")
            return
        before = self._told.get(keys[place - 1])
        if before is not None:  # else the coordinator died before it could tell
            demand(certificate.follows(before), "I1", f"the certificate of {certificate.key} breaks the chain")

    def _check_position(self, certificate: Certificate) -> None:
        position, step = certificate.position, certificate.made.outer_step
        rest = {index for piece in position.unconsumed for index in range(piece.start, piece.stop)}
        commits = self._sim.checkers.history.lineage.commits
        consumed = set(consumed_by(commit for commit in commits if commit.outer_step <= step))
        demand(not consumed & rest, "I7", "a certificate offers samples that a commit has consumed")
        demand(len(consumed) + len(rest) == position.next_index, "I7", "a certificate loses samples")

    def coordinator_started(self) -> None:
        self._brought = {}

    def brought(self, sender: PeerRef, message: PeerMessage) -> None:
        """Whoever is let in and shows a genuine certificate has proved a commit, member or not."""
        match message:
            case Join(certificate=certificate, manifest_digest=digest) if digest == self._sim.manifest:
                self._brought.pop(sender, None)
                if certificate is not None and certificate.check(self._sim.keys):
                    self._brought[sender] = certificate
            case Leave():
                self._brought.pop(sender, None)
            case _:
                pass

    def turned_away(self, to: PeerRef) -> None:
        """What it brought counts no more: it was evicted, or is of another run."""
        self._brought.pop(to, None)

    # ------------------------------------------------------------------------ the peers

    def started(self, node: "PeerNode") -> None:
        node.proof = node.disk_certificate
        node.rebuilt_epoch = node.heard_epoch = 0

    def heard(self, node: "PeerNode", message: CoordinatorMessage) -> None:
        """It arrived at this peer: from now on it can prove it."""
        match message:
            case Commit(certificate=certificate):
                proof = node.proof
                if certificate.key.epoch >= node.rebuilt_epoch and (proof is None or certificate.order > proof.order):
                    node.proof = certificate
            case NewView(view=view):
                node.heard_epoch = max(node.heard_epoch, view.epoch)
            case Rebuilt():
                if message.epoch > max(node.rebuilt_epoch, node.proof.key.epoch if node.proof is not None else 0):
                    node.proof, node.rebuilt_epoch = message.certificate, message.epoch
            case _:
                pass

    def knows(self, node: "PeerNode", message: CoordinatorMessage) -> None:
        """The newest commit, in the newest epoch that it has heard of, is kept: it may be asked to prove it."""
        self._epochs[node.ref] = max(self._epochs.get(node.ref, 0), _epoch_of(message))
        if not isinstance(message, Commit) or message.certificate.key.epoch < self._epochs[node.ref]:
            return
        kept, proof = node.disk_certificate, node.proof
        is_kept = proof != message.certificate or (kept is not None and kept.order >= message.certificate.order)
        demand(is_kept, "I3", "{} has heard of a commit, and does not keep its certificate", node.ref)

    # ------------------------------------------------------------------------ a lost journal

    def _rebuilt(self, record: RebuildRecord) -> None:
        chosen = record.certificate
        if chosen is not None:
            known = self._told.get(chosen.key)
            is_told = known is not None and encode_certificate(known) == encode_certificate(chosen)
            demand(is_told, "I1", "rebuilt from a certificate that nobody was ever told")
        if not record.insisted:
            named = set() if chosen is None else {item.peer_id for item in chosen.contributors}
            testified = {ref.peer_id for ref in record.testified} & named
            few = f"{len(testified)} of {len(named)} testify, and the run is rebuilt by nobody's wish"
            demand(2 * len(testified) > len(named), "I3", few)
        for ref, certificate in self._brought.items():
            if self._sim.peers[ref.peer_id].ref == ref:
                newer = chosen is None or certificate.order > chosen.order
                demand(not newer, "I3", f"{ref.peer_id} has brought a newer certificate in vain")
        for ref in record.testified:
            node = self._sim.peers[ref.peer_id]
            if node.ref == ref and node.alive:
                heard = max(node.heard_epoch, node.rebuilt_epoch)
                demand(record.epoch > heard, "I8", f"rebuilt under {record.epoch}, {ref.peer_id} testified {heard}")
            if node.ref == ref and node.alive and node.proof is not None:
                demand(chosen is not None, "I3", f"{ref.peer_id} has proved a commit in vain")
                assert chosen is not None
                newer = node.proof.order > chosen.order
                demand(not newer, "I3", f"rebuilt from {chosen.order}, but {ref.peer_id} testified {node.proof.order}")

# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in elastic, by who must act.

    ElasticError
    ├── expected: try again, in another view or from another donor
    │   ├── NotAMember(reason)                this peer was put out of the view while somebody waited
    │   ├── NoDonor(target_step, causes)      nobody could serve the state this time
    │   └── NoText(causes)                    nobody gave the run's text
    ├── another peer's fault: that peer is dropped
    │   ├── DonorRefused(reason)              the donor cannot serve what was asked
    │   ├── DonorStalled(waited_s, ...)       the donor is slower than the floor
    │   ├── ChunkCorrupted(index)             bytes do not have the digest of the manifest
    │   ├── ManifestInvalid(reason)           the manifest contradicts itself or the target
    │   └── StateDiverged(outer_step, ...)    a replayed commit did not give the committed digest
    ├── the operator's fault: exit code and one sentence
    │   ├── StateMismatch(reason)             the run's state has other tensors than this peer's model
    │   ├── JournalOutdated(reason)           the journal is an old copy: a peer knows newer commits
    │   └── JournalError(path)
    │       ├── JournalInUse                  another live coordinator writes this journal
    │       ├── Superseded(holder)            another coordinator has taken this journal over; it was ours
    │       ├── JournalOfAnotherRun(...)      the file belongs to another run
    │       ├── JournalCorrupted(slot)        a record is missing, moved or changed
    │       ├── JournalUnreadable(cause)      not there, or not ours to read
    │       └── JournalUnwritable(cause)      disk full, read-only, gone; etcd without a quorum for too long
    ├── EtcdError                             inside etcd_store.py, which makes journal errors of them
    │   ├── EtcdUnavailable(waited_s, causes) no node answered in time; it may have done what was asked all the same
    │   ├── EtcdRefused(code, reason)         etcd does not do this: no permission, no space, no such lease
    │   └── EtcdTooMuch(limit_nbytes)         the answer is longer than we read
    └── RunFinished(code, reason)             this peer's part in the run is over

Network errors between peers are collective.errors; elastic adds none of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath


class ElasticError(Exception):
    """Base of the package's errors."""


class NotAMember(ElasticError):
    """This peer is no member of the view (any more), so what was asked for cannot be had now."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not a member: {reason}")
        self.reason = reason


class RoundMissed(ElasticError):
    """The round was committed without this peer's payload, which was late. The work belongs to the next round."""

    def __init__(self, outer_step: int) -> None:
        super().__init__(f"the round from outer step {outer_step} was committed without this peer")
        self.outer_step = outer_step


class RunFinished(ElasticError):
    """This peer's part in the run is over; `code` is the exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"the run is over for this peer (exit code {code}): {reason}")
        self.code = code
        self.reason = reason


class NoDonor(ElasticError):
    """No donor could bring the state to the target. `causes` has one line for each donor that was tried."""

    def __init__(self, target_step: int, causes: tuple[str, ...]) -> None:
        super().__init__(f"no donor could serve step {target_step}: {'; '.join(causes) or 'there is no donor'}")
        self.target_step = target_step
        self.causes = causes


class NoText(ElasticError):
    """No peer could give the run's text. `causes` has one line for each that was tried."""

    def __init__(self, causes: Sequence[str]) -> None:
        super().__init__(f"nobody gives it: {', '.join(causes) or 'no peer is there'}")
        self.causes = tuple(causes)


class DonorFault(ElasticError):
    """A donor did not do its part. The learner drops it and goes on with the next."""


class DonorRefused(DonorFault):
    """The donor answered that it cannot serve what was asked; `is_busy`: not now."""

    def __init__(self, reason: str, *, is_busy: bool = False) -> None:
        super().__init__(f"donor refused: {reason}")
        self.reason = reason
        self.is_busy = is_busy


class DonorStalled(DonorFault):
    """The donor sent less than the floor within the time for one answer."""

    def __init__(self, waited_s: float, expected_nbytes: int) -> None:
        super().__init__(f"donor stalled: {expected_nbytes} bytes did not arrive within {waited_s:.1f} s")


class ChunkCorrupted(DonorFault):
    """A chunk arrived whole, yet its bytes do not have the digest that the manifest names."""

    def __init__(self, index: int) -> None:
        super().__init__(f"chunk {index} of the state does not have the digest of its manifest")
        self.index = index


class ManifestInvalid(DonorFault):
    """A manifest whose root is not its own, or not the one the commit names."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"state manifest is invalid: {reason}")
        self.reason = reason


class StateUnknown(DonorFault):
    """A donor offers a state that the coordinator has not named, or of whose step it has named another one."""

    def __init__(self, outer_step: int, digest: bytes) -> None:
        super().__init__(f"the coordinator has not named the state {digest.hex()[:16]} of step {outer_step}")
        self.outer_step = outer_step
        self.digest = digest


class StateDiverged(DonorFault):
    """Applying a recorded commit gave another digest than the committed one."""

    def __init__(self, outer_step: int, expected: bytes, actual: bytes) -> None:
        super().__init__(f"state of step {outer_step} is {actual.hex()[:16]}, committed was {expected.hex()[:16]}")
        self.outer_step = outer_step
        self.expected = expected
        self.actual = actual


class StateMismatch(ElasticError):
    """The run's shared state has other tensor names or sizes than this peer's model."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the run's state does not fit this peer's model: {reason}")
        self.reason = reason


class JournalOutdated(ElasticError):
    """The journal is an old copy. The members do not listen to its coordinator, which has to go."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; start the coordinator that has the newest journal, or move this away and --rebuild"
        )
        self.reason = reason


class JournalError(ElasticError):
    """Base of what a journal can do wrong. `path` is the file, or what its keys in etcd begin with."""

    def __init__(self, path: PurePath, message: str) -> None:
        super().__init__(message)
        self.path = path


class JournalInUse(JournalError):
    """Another live process writes this journal. `holder` says who, where that is known."""

    def __init__(self, path: PurePath, holder: str | None = None) -> None:
        told = "another coordinator; stop that one first"
        if holder is not None:
            told = f"the coordinator at {holder}; stop that one, or let this one stand by for it"
        super().__init__(path, f"journal {path} is in use by {told}")
        self.holder = holder


class Superseded(JournalError):
    """Another coordinator writes this journal now; what was decided here since then was told to nobody."""

    def __init__(self, path: PurePath, holder: str) -> None:
        super().__init__(path, f"journal {path} was taken over by the coordinator at {holder}; this one has stopped")
        self.holder = holder


class JournalOfAnotherRun(JournalError):
    """The file holds the journal of another run."""

    def __init__(self, path: PurePath, expected: str, actual: str) -> None:
        super().__init__(path, f"journal {path} belongs to run {actual}, not to {expected}; give another path")
        self.expected = expected
        self.actual = actual


class JournalCorrupted(JournalError):
    """A record is missing, moved, changed or unreadable. `slot` is the first bad one, None if no row can be read."""

    def __init__(self, path: PurePath, slot: int | None, cause: str) -> None:
        where = "the file" if slot is None else f"record {slot}"
        super().__init__(
            path, f"journal {path} is corrupted at {where}: {cause}; --rebuild the run, which moves it aside"
        )
        self.slot = slot
        self.cause = cause


class JournalUnreadable(JournalError):
    """The file cannot be read where it is. Says nothing of its records."""

    def __init__(self, path: PurePath, cause: str) -> None:
        super().__init__(path, f"journal {path} cannot be read: {cause}")
        self.cause = cause


class JournalUnwritable(JournalError):
    """The record is not known to be durable; the coordinator must stop and tell nobody of it."""

    def __init__(
        self, path: PurePath, cause: str, *, cure: str = "free space or fix permissions, then restart"
    ) -> None:
        super().__init__(path, f"journal {path} cannot be written: {cause}; {cure}")
        self.cause = cause


class EtcdError(ElasticError):
    """Base of what etcd can do wrong."""


class EtcdUnavailable(EtcdError):
    """No node answered in time. What was asked may have been done all the same. `causes` by endpoint."""

    def __init__(self, waited_s: float, causes: Mapping[str, str]) -> None:
        told = ", ".join(f"{endpoint} ({cause})" for endpoint, cause in causes.items()) or "it was closed here"
        super().__init__(f"etcd gave no answer for {waited_s:.1f} s: {told}")
        self.waited_s = waited_s
        self.causes = causes


class EtcdRefused(EtcdError):
    """Etcd says no, and would again. `code` is gRPC's."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"etcd refuses: {reason} (code {code})")
        self.code = code
        self.reason = reason


class EtcdTooMuch(EtcdError):
    """The answer is longer than we read; ask for less."""

    def __init__(self, limit_nbytes: int) -> None:
        super().__init__(f"etcd's answer has more than {limit_nbytes} bytes")
        self.limit_nbytes = limit_nbytes

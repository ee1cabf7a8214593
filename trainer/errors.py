# SPDX-License-Identifier: Apache-2.0
"""How this program ends: exit codes, and the errors that an operator can do something about.

Rules: an operator's error is one sentence that says what is wrong and, behind it, what to do; it is printed without a
traceback. Everything else is our bug: exit code 1, traceback, story. Must not know where errors are caught.

::

    IsthmusError                 exit code
    ├── RunComplete              0   nothing is left to train
    ├── ConfigError              2   a flag, a config value, a path (ConfigErrors: several)
    ├── EnvironmentFault         3   this machine: disk, port, permissions, missing device
    │   ├── CheckpointFailed         a checkpoint was not written; training goes on
    │   └── NotOurs                  a run's folder belongs to another user
    ├── NobodyReachable          4   no peer answers
    │   └── NothingRuns              no daemon of ours in this folder
    ├── Refused                  5   version, manifest
    │   └── TicketRefused            the ticket (trainer/contact/ticket.py says why)
    ├── TrainingFault            8   e.g. the loss is not finite
    ├── IntegrityError           9
    │   └── CheckpointCorrupted      bytes on the disk are not what was written
    ├── LoopLeft                 20  a loop of somebody's own has ended before its run
    └── WorkerCrashed            10
        ├── WorkerDiverged           its values are no numbers any more
        └── WorkerOutOfMemory        what it was asked for does not fit
"""

import enum
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """What the process tells its supervisor; it may start the program again on those of `RESTARTABLE`."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    ENVIRONMENT = 3
    NOBODY_REACHABLE = 4
    REFUSED = 5
    NO_STATE = 7
    TRAINING_FAULT = 8
    INTEGRITY = 9
    WORKER_CRASHED = 10
    LEFT = 20
    FORCED = 130


RESTARTABLE = frozenset(
    {
        ExitCode.UNEXPECTED,
        ExitCode.NOBODY_REACHABLE,
        ExitCode.NO_STATE,
        ExitCode.WORKER_CRASHED,
    }
)


class IsthmusError(Exception):
    """Something the operator must act on.

    Attributes:
        exit_code: what the process ends with.
        problem: what is wrong, without a full stop.
        cure: what to do, as a clause; empty where `problem` says it.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.UNEXPECTED

    def __init__(self, problem: str, *, cure: str = "") -> None:
        self.problem = problem
        self.cure = cure
        super().__init__(f"{problem}; {cure}" if cure else problem)


class ConfigError(IsthmusError):
    """A flag, a config value or a path that cannot be.

    Attributes:
        key: the dotted config key at fault, if there is one.
        origin: where its value came from, if known.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, problem: str, *, cure: str = "", key: str | None = None, origin: str | None = None) -> None:
        super().__init__(problem, cure=cure)
        self.key = key
        self.origin = origin

    @property
    def faults(self) -> "tuple[ConfigError, ...]":
        """Every mistake in it, this one if it is no other's."""
        return (self,)


class ConfigErrors(ConfigError):
    """Several mistakes, told together so that nobody finds them one by one.

    Attributes:
        faults: at least two.
    """

    def __init__(self, faults: Sequence[ConfigError]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self._faults = tuple(faults)

    @property
    def faults(self) -> tuple[ConfigError, ...]:
        """Every mistake."""
        return self._faults


class EnvironmentFault(IsthmusError):
    """This machine does not allow it."""

    exit_code = ExitCode.ENVIRONMENT


class CheckpointFailed(EnvironmentFault):
    """A checkpoint could not be written. The earlier ones are untouched, nothing half-written is left behind.

    Attributes:
        path: where the checkpoint was to be.
        cause: what the system said.
    """

    def __init__(self, path: Path, cause: OSError) -> None:
        super().__init__(
            f"checkpoint {path} was not written: {cause.strerror or cause}",
            cure="free some space there or give another folder with --dir; training goes on, earlier checkpoints stand",
        )
        self.path = path
        self.cause = cause


class NotOurs(EnvironmentFault):
    """This user may not look into a folder where a run may be."""

    def __init__(self, folder: Path) -> None:
        try:
            owner = f"its owner, user {folder.stat().st_uid}"
        except OSError:
            owner = "its owner"
        super().__init__(f"user {os.geteuid()} may not read {folder}", cure=f"run this command as {owner}")


def require_ours(path: Path) -> None:
    """See that this user may look into a folder, if it is there.

    Raises:
        NotOurs: it, or one that it lies in, is closed. Python's own look at it would raise PermissionError.
    """
    as_effective = os.access in os.supports_effective_ids
    for folder, rights in (*((parent, os.X_OK) for parent in reversed(path.parents)), (path, os.R_OK | os.X_OK)):
        if os.path.isdir(folder) and not os.access(folder, rights, effective_ids=as_effective):
            raise NotOurs(folder)


class NobodyReachable(IsthmusError):
    """Nobody answers."""

    exit_code = ExitCode.NOBODY_REACHABLE


class RunComplete(IsthmusError):
    """The run has made all of its outer steps: nothing is left to train."""

    exit_code = ExitCode.DONE


class NothingRuns(NobodyReachable):
    """No daemon of ours runs in this folder."""


class Refused(IsthmusError):
    """The other side does not want us, and asking again will not help.

    Attributes:
        fields: the config keys that differ, where that is the reason.
    """

    exit_code = ExitCode.REFUSED

    def __init__(self, problem: str, *, cure: str = "", fields: Sequence[str] = ()) -> None:
        super().__init__(problem, cure=cure)
        self.fields = tuple(fields)


class TrainingFault(IsthmusError):
    """The training itself has failed."""

    exit_code = ExitCode.TRAINING_FAULT


class IntegrityError(IsthmusError):
    """Bytes are not what they should be."""

    exit_code = ExitCode.INTEGRITY


class CheckpointCorrupted(IntegrityError):
    """A checkpoint is not what was written.

    Attributes:
        path: the file or folder at fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path, reason: str, *, cure: str = "delete it, or resume from another checkpoint") -> None:
        super().__init__(f"{path} {reason}", cure=cure)
        self.path = path
        self.reason = reason


class WorkerCrashed(IsthmusError):
    """A worker process of this peer is gone."""

    exit_code = ExitCode.WORKER_CRASHED


class WorkerDiverged(WorkerCrashed):
    """The workers' values are no numbers any more: what they did since the last commit is worth nothing."""

    def __init__(self, outer_step: int, fragment: str, *, cure: str = "lower inner.lr or inner.grad_clip") -> None:
        super().__init__(
            f"the values of fragment {fragment} are not finite, found before outer step {outer_step}", cure=cure
        )
        self.outer_step = outer_step
        self.fragment = fragment

    def of_loop(self) -> "WorkerDiverged":
        """The same where a loop of somebody's own trains."""
        cure = "lower the loop's learning rate or clip its gradients, and start the loop again"
        return WorkerDiverged(self.outer_step, self.fragment, cure=cure)


class WorkerOutOfMemory(WorkerCrashed):
    """What a worker was asked for does not fit into the memory of its device."""


class LoopLeft(IsthmusError):
    """The loop of somebody's own that trained here has ended in order, before its run."""

    exit_code = ExitCode.LEFT


def operator_error(error: BaseException) -> IsthmusError | None:
    """The operator's error in what a command raised; None if any part of it is our bug.

    Task groups hand on groups of errors; the first one is what happened first.
    """
    found = leaves(error)
    known = [leaf for leaf in found if isinstance(leaf, IsthmusError)]
    return known[0] if known and len(known) == len(found) else None


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of groups, in the order in which they happened; an error that is no group is its own."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]

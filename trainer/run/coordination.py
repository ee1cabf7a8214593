# SPDX-License-Identifier: Apache-2.0
"""The coordinator in this process: the store that its configuration names, the right to write there, and its shell.

    SQLite    the file's lock is the right; nobody stands by
    etcd      an election: a founder waits for a lease that may be its own predecessor's, a standby for as long as it
              takes; then signs of life go out until the process ends

Rules: the address is taken before the election, so that a standby that could not serve says so when it is started; it
is served after it, so that whoever dials a standby is refused by the system and tries the next address. Must not know
peers, nor what a command looks like.

Errors: `EnvironmentFault` (3) where another coordinator has the journal or it cannot be written; `NobodyReachable` (4)
where etcd does not answer; `Refused` (5) where another coordinator has taken over; `IntegrityError` (9).
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from isthmus.collective.core.types import PeerRef
from isthmus.elastic.core.config import CoordinatorConfig, RebuildRule
from isthmus.elastic.errors import (
    EtcdUnavailable,
    JournalCorrupted,
    JournalError,
    JournalInUse,
    JournalOutdated,
    Superseded,
)
from isthmus.elastic.journal.etcd import EtcdAccess
from isthmus.elastic.journal.etcd_store import EtcdStore
from isthmus.elastic.journal.journal import Journal, set_aside
from isthmus.elastic.journal.store import Store
from isthmus.elastic.observation import Observe
from isthmus.elastic.shell.coordinator import CoordinatorShell
from isthmus.trainer.config.peers import CoordinatorSection
from isthmus.trainer.errors import ConfigError, EnvironmentFault, IntegrityError, NobodyReachable, Refused
from isthmus.trainer.run.founding import JOURNAL_NAME
from isthmus.trainer.threads import in_thread

log = logging.getLogger(__name__)

_POLL_S = 0.5
_FIRST_ANSWER_S = 30.0
"""A founder whose etcd does not answer for so long gives up."""
_PREDECESSOR_S = 8.0
"""How long a founder waits for the lease of a leader that may be dead: the lease and its last sign of life."""


class Coordination:
    """See the module. `open`, then `run` as a task; `close` in the end, whatever has happened.

    Args:
        section: `[coordinator]`.
        config: rules of the run.
        run_id: the run's.
        me: this start of this process.
        run_dir: its folder.
        rebuild: how an empty journal, which was lost, is made anew, also in place of a damaged one; None if it may be
            a new run's.
        observe: told of every record and connection.
    """

    def __init__(
        self,
        section: CoordinatorSection,
        config: CoordinatorConfig,
        *,
        run_id: str,
        me: PeerRef,
        run_dir: Path,
        rebuild: RebuildRule | None = None,
        observe: Observe,
    ) -> None:
        self._section = section
        self._config = config
        self._run_id = run_id
        self._me = me
        self._run_dir = run_dir
        self._rebuild = rebuild
        self._observe = observe
        self._store: Journal | EtcdStore | None = None
        self._signs: asyncio.Task[None] | None = None
        self._shell: CoordinatorShell | None = None

    async def open(
        self, tasks: asyncio.TaskGroup, *, address: str, stands_by: bool, closing: asyncio.Event
    ) -> CoordinatorShell | None:
        """Wait for the right to coordinate, and read the journal. None if `closing` was set before.

        Args:
            tasks: for the signs of life; `close` ends them.
            address: where peers will find this coordinator.
            stands_by: whether to wait for another coordinator's end, however long.
            closing: set when nobody wants it any more.
        """
        with journal_errors():
            if self._section.store == "sqlite":
                try:
                    return self._read_file()
                except JournalCorrupted as error:
                    if self._rebuild is None:
                        raise
                    self.close()
                    aside = set_aside(self._run_dir / JOURNAL_NAME)
                    log.warning("journal_set_aside to=%s cause=%r; the run is rebuilt without it", aside, str(error))
                return self._read_file()
            store = self._store = self._etcd_store(address)
            if not await (_stand_by(store, self._run_id, closing) if stands_by else _lead(store, closing)):
                return None
            self._signs = tasks.create_task(self._give_signs(store))  # they must not wait for a long journal's end
            self._shell = await self._read(store)
            log.info("coordinating store=%s outer_step=%d", store.path, self._shell.outer_step)
            return self._shell

    async def run(self) -> None:
        """Coordinate until cancelled."""
        assert self._shell is not None
        with journal_errors():
            await self._shell.run()

    def close(self) -> None:
        """Let go of the journal. May be called twice."""
        if self._signs is not None:
            self._signs.cancel()
        if self._store is not None:
            self._store.close()

    def _etcd_store(self, address: str) -> EtcdStore:
        section = self._section
        try:
            return EtcdStore(
                etcd_access(section),
                run_id=self._run_id,
                peer_id=self._me.peer_id,
                address=address,
                keep_archives=section.keep_archives,
                patience_s=section.etcd_patience_s,
            )
        except OSError as error:
            raise ConfigError(
                f"the certificates for etcd cannot be used: {error}",
                cure="name PEM files in coordinator.etcd_ca, etcd_cert and etcd_key",
                key="coordinator.etcd_ca",
            ) from error

    def _read_file(self) -> CoordinatorShell:
        section = self._section
        journal = self._store = Journal(
            self._run_dir / JOURNAL_NAME, run_id=self._run_id, keep_archives=section.keep_archives
        )
        self._shell = self._shell_over(journal)
        return self._shell

    def _shell_over(self, store: Store) -> CoordinatorShell:
        return CoordinatorShell(
            self._config,
            store,
            rebuild=self._rebuild,
            compact_every=self._section.compact_every,
            observe=self._observe,
        )

    async def _read(self, store: EtcdStore) -> CoordinatorShell:
        build = partial(self._shell_over, store)
        reading = asyncio.get_running_loop().run_in_executor(None, build)
        try:
            await asyncio.wait([reading])
        except asyncio.CancelledError:
            store.close()  # ends the reading, which would wait for etcd as long as for any record
            await asyncio.wait([reading])
            reading.exception()  # nobody wants it
            raise
        return reading.result()

    async def _give_signs(self, store: EtcdStore) -> None:
        clock = asyncio.get_running_loop().time
        answered_at = clock()
        with journal_errors():
            while True:
                await asyncio.sleep(store.sign_of_life_s)
                if await in_thread(store.keep_alive):
                    answered_at = clock()
                if self._shell is None or not self._section.addresses:
                    continue
                # Without a sign of life our lease ends, and a standby that can reach etcd serves by now.
                if clock() - answered_at <= 3 * store.sign_of_life_s:
                    self._shell.welcome()
                elif not self._shell.is_away:
                    log.warning("peers_sent_away; etcd does not answer, and another coordinator may serve")
                    self._shell.send_away("the coordinator cannot reach its journal")


def etcd_access(section: CoordinatorSection) -> EtcdAccess:
    """Where etcd is, and what it wants to see.

    Raises:
        ConfigError: the password's file cannot be read.
    """
    password = None
    if section.etcd_password_file is not None:
        try:
            password = section.etcd_password_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the password for etcd cannot be read from {section.etcd_password_file}: {error}",
                cure="name a file that holds it and nothing else",
                key="coordinator.etcd_password_file",
            ) from error
    return EtcdAccess(
        endpoints=section.etcd,
        ca_file=section.etcd_ca,
        cert_file=section.etcd_cert,
        key_file=section.etcd_key,
        user=section.etcd_user,
        password=password,
    )


async def _lead(store: EtcdStore, closing: asyncio.Event) -> bool:
    clock = asyncio.get_running_loop().time
    began = clock()
    while not closing.is_set():
        try:
            holder = await in_thread(store.try_to_lead)
        except EtcdUnavailable as error:
            if clock() - began > _FIRST_ANSWER_S:
                cure = "check coordinator.etcd, and that most of its nodes run"
                raise NobodyReachable(str(error), cure=cure) from error
            log.warning("etcd_silent cause=%r", str(error))
        else:
            if holder is None:
                return True
            if clock() - began > _PREDECESSOR_S:
                raise JournalInUse(store.path, holder.address)
        await _pause(closing)
    return False


async def _stand_by(store: EtcdStore, run_id: str, closing: asyncio.Event) -> bool:
    is_known = has_begun = False
    seen: str | None = None
    while not closing.is_set():
        try:
            is_known = is_known or await in_thread(store.knows_run)
            if not is_known:
                raise Refused(
                    f"etcd knows nothing of run {run_id}",
                    cure="give the standby the same coordinator.etcd as the run's coordinator",
                )
            # How a run begins only its founder knows: a checkpoint may be in it.
            has_begun = has_begun or await in_thread(store.has_begun)
            holder = await in_thread(store.try_to_lead if has_begun else store.holder)
        except EtcdUnavailable as error:
            log.warning("etcd_silent cause=%r", str(error))
        else:
            if has_begun and holder is None:
                return True
            if seen != (seen := "nobody yet" if holder is None else holder.address):
                log.info("standing_by for=%s", seen)
        await _pause(closing)
    return False


async def _pause(closing: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_POLL_S):
            await closing.wait()


@contextlib.contextmanager
def journal_errors() -> Iterator[None]:
    """What a store can do wrong, as the operator's errors."""
    try:
        yield
    except (JournalCorrupted, JournalOutdated) as error:
        raise IntegrityError(str(error)) from error
    except Superseded as error:
        raise Refused(str(error), cure="start it as a standby if it is still wanted") from error
    except JournalError as error:
        raise EnvironmentFault(str(error)) from error

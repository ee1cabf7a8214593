# SPDX-License-Identifier: Apache-2.0
"""What a process must know before its first socket is opened: the run's terms, its text, who is who.

    a founder     decides, or finds in its folder what it has decided before
    a joiner      asks whoever coordinates, with a ticket or as a peer that is known; gets the text it lacks from peers
    a standby     asks as a joiner does, once; its folder remembers

Must not know listeners, peers or journals.
"""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import assert_never

from cryptography import x509

from isthmus.collective.core.types import PeerId, PeerRef
from isthmus.collective.transport import Channel, Hello, Mode, Purpose, Security, TicketSecurity, connect
from isthmus.collective.transport.certificates import certificate_from_bytes, is_signed_by, key_in
from isthmus.collective.transport.security import wall_s
from isthmus.trainer.checkpoint.checkpoint import Checkpoint
from isthmus.trainer.checkpoint.remote import find_resumed, is_url, reaching
from isthmus.trainer.config.base_model import require_base_model, with_base_model
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import LoopModelSection
from isthmus.trainer.config.wiring import fragments_of, tokens_per_sample, with_vocabulary
from isthmus.trainer.contact.admission import RunTerms, authority_of, hello_maker, own_security
from isthmus.trainer.contact.identity import PeerFolder, PeerIdentity
from isthmus.trainer.contact.joining import Admission, ask_admission, stranger_hello, stranger_security
from isthmus.trainer.contact.ticket import NEWEST_ID, Ticket, issue_token
from isthmus.trainer.data.givers import Dial, Find, from_peers
from isthmus.trainer.data.text import (
    FoundText,
    complete,
    fetch_text,
    founders_text,
    joiners_text,
    vocabulary_here,
    vocabulary_of,
)
from isthmus.trainer.errors import ConfigError, NobodyReachable, Refused
from isthmus.trainer.run.founding import (
    Founded,
    found_or_go_on,
    recall_membership,
    recall_terms,
    recall_text,
    remember_membership,
    stand_by,
    take_over,
)
from isthmus.trainer.run.options import CoordinatorOptions, Founding, Joining, PeerOptions, StandingBy
from isthmus.trainer.run.room import require_room
from isthmus.trainer.threads import in_thread
from isthmus.trainer.workers.loop import Loop

_RETRY_PAUSE_S = 1.0
_DIAL_TIMEOUT_S = 5.0
NO_TEXT_DIGEST = hashlib.sha256().hexdigest()
"""Of the text of a run whose peers have their own data."""
_STANDBY_TOKEN_S = 86_400
"""Of the token that a standby makes for itself; two clocks may differ by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known before the listener is opened. `founded` only where a coordinator lives; `text` neither for a
    standby, which needs none, nor where the run's peers train by loops of their own. `coordinators` are none where one
    lives, until it has an address."""

    options: PeerOptions | CoordinatorOptions
    folder: PeerFolder
    me: PeerRef
    config: Config
    terms: RunTerms
    text: FoundText | None
    security: Security
    coordinators: tuple[str, ...] = ()
    founded: Founded | None = None
    seen_from: str | None = None
    """The host that the coordinator saw us come from."""

    @property
    def loop(self) -> Loop | None:
        """Who trains here, if it is a loop of somebody's own."""
        return self.options.loop if isinstance(self.options, PeerOptions) else None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The state that a founder goes on from."""
        return None if self.founded is None else self.founded.checkpoint

    async def dial(self, address: str, purpose: Purpose, *, timeout_s: float, expect: PeerId | None = None) -> Channel:
        """Open a connection as this process, to this peer or to whoever is there."""
        hello = hello_maker(self.me, self.terms.run_id)(purpose, 0, 1)
        return await connect(address, hello, timeout_s=timeout_s, security=self.security, expect=expect)


async def prepare(options: PeerOptions | CoordinatorOptions, folder: PeerFolder) -> Start:
    """Find everything out.

    Raises:
        IsthmusError: what the operator must act on.
    """
    me = folder.start_identity()
    start = partial(Start, options=options, folder=folder, me=me.ref)
    match options.role:
        case Founding(resume_from=resume_from, rebuild=rebuild):
            resolved = options.resolved if rebuild is None else options.resolved.adopt(take_over(folder))
            config = await in_thread(with_base_model, resolved.config)
            if not config.is_loops:
                config = with_vocabulary(config, *await in_thread(vocabulary_here, config))
            fragments_of(config)  # what cannot be split is told before there is a run
            _require_loop(options, config)
            await _require_room(options, config)
            resume_dir = None if resume_from is None else await in_thread(_at_hand, resume_from, folder.path)
            text = None
            if not config.is_loops:
                kept = recall_text(folder.path, config, is_resumed=resume_dir is not None)
                text = await in_thread(founders_text, folder.path, config, kept)
                config = with_vocabulary(config, *vocabulary_of(text.corpus))
                if isinstance(options, PeerOptions):
                    text = await complete(text, folder.path, config, None)
            data_digest = NO_TEXT_DIGEST if text is None else text.corpus.digest
            founded = found_or_go_on(folder, config, data_digest, resume_dir)
            security = _coordinators_security(me, founded, config, folder.load_certificate())
            return start(config=config, terms=founded.terms, text=text, security=security, founded=founded)
        case Joining(ticket=ticket):
            admission, coordinators = await _join(options, folder, me, ticket)
            terms = admission.terms
            config = options.resolved.adopt(terms.manifest).config
            _require_loop(options, config)
            await in_thread(require_base_model, config)
            await _require_room(options, config)
            here = None
            if not config.is_loops:
                here = await in_thread(joiners_text, folder.path, config, terms.data_digest)
            security = _members_security(me, admission, config)
            folder.keep_certificate(admission.certificate)
            remember_membership(folder, terms, coordinators)
            if not config.is_loops:
                find, dial = _ways_to_peers(options, folder, me, admission, coordinators, security)
                if here is None:
                    here = await fetch_text(folder.path, config, terms.data_digest, find=find, dial=dial)
                here = await complete(here, folder.path, config, from_peers(find, dial))
            came_from = admission.seen_from or None
            return start(
                config=config, terms=terms, text=here, security=security, coordinators=coordinators, seen_from=came_from
            )
        case StandingBy(ticket=ticket):
            # Whoever has the secret may ask at any time.
            token = issue_token(NEWEST_ID, ticket.secret, ticket.run_id, round(wall_s()) + _STANDBY_TOKEN_S)
            terms = (
                recall_terms(folder, ticket.run_id)
                or (
                    await _ask(
                        ticket.addresses,
                        stranger_hello(me, ticket.run_id, token),
                        stranger_security(ticket, options.resolved.config.net.tls),
                    )
                ).terms
            )
            config = options.resolved.adopt(terms.manifest).config
            founded = stand_by(folder, terms, ticket.secret)
            security = _coordinators_security(me, founded, config, None)
            return start(config=config, terms=terms, text=None, security=security, founded=founded)
        case _:
            assert_never(options.role)


def _at_hand(resume_from: str, folder: Path) -> Path:
    """Where the checkpoint to start from lies on this disk; of a URL it is fetched."""
    if not is_url(resume_from):
        return Path(resume_from)
    remote, step = find_resumed(resume_from)
    with reaching(resume_from):
        return remote.fetch(step, folder)


async def _require_room(options: PeerOptions | CoordinatorOptions, config: Config) -> None:
    """What the run takes fits here, before anything is fetched or started. A coordinator alone takes little."""
    if isinstance(options, PeerOptions):
        await in_thread(require_room, config, options.run_dir, has_loop=options.loop is not None)


def _require_loop(options: PeerOptions | CoordinatorOptions, config: Config) -> None:
    """Whoever trains here trains what the run does."""
    loop = options.loop if isinstance(options, PeerOptions) else None
    if not isinstance(config.model, LoopModelSection):
        if loop is not None:
            raise ConfigError(
                "this run trains isthmus's own model", cure="isthmus join takes part in it without a loop"
            )
        return
    if loop is None:
        if isinstance(options, PeerOptions):
            raise ConfigError(
                "this run's peers train by loops of their own",
                cure="take part in it with isthmus.attach in such a loop",
            )
        return
    pairs = itertools.zip_longest(loop.facts.parameters, config.model.parameters)
    for ours, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"the loop's model is not the run's: here {ours or 'nothing'}, in the run {theirs or 'nothing'}",
                cure="build the same model on all peers, and train the same of its parameters",
            )
    if config.inner.type == "loop" and loop.facts.states != config.inner.states:
        here, there = (", ".join(states) or "nothing" for states in (loop.facts.states, config.inner.states))
        raise ConfigError(
            f"the loop's optimizer keeps {here} for each parameter, in the run it is {there}",
            cure="use the same kind of optimizer on all peers",
        )
    counts, wanted = loop.facts.tokens_per_sample, tokens_per_sample(config.model)
    if counts != wanted:
        # Found before: the one with the smaller number weighed next to nothing in silence, or the one with the larger
        # number was put out for a lie about its work.
        raise ConfigError(
            f"a sample of this loop counts for {counts} token{'s' * (counts != 1)}, in the run for {wanted}",
            cure=f"give isthmus.attach the run's number, tokens_per_sample={wanted}",
        )


async def _join(
    options: PeerOptions | CoordinatorOptions, folder: PeerFolder, me: PeerIdentity, ticket: Ticket | None
) -> tuple[Admission, tuple[str, ...]]:
    """Ask to be let in, with the ticket or as a peer that was there before. Also: where the run's coordinators are."""
    kept, certificate = recall_membership(folder.path), folder.load_certificate()
    if certificate is not None and key_in(certificate) != me.key.public_key().public_bytes_raw():
        certificate = None
    if ticket is not None:
        is_known = kept is not None and kept.terms.run_id == ticket.run_id
        hello = stranger_hello(me, ticket.run_id, ticket.token, certificate if is_known else None)
        security = stranger_security(ticket, options.resolved.config.net.tls)
        return await _ask(ticket.addresses, hello, security), ticket.addresses
    if kept is None or certificate is None:
        raise ConfigError(
            f"{folder.path} has joined no run yet", cure="join with a ticket, which the run's coordinator prints"
        )
    authorities = [key_in(certificate_from_bytes(one)) for one in kept.terms.authorities]
    is_encrypted = options.resolved.adopt(kept.terms.manifest).config.net.tls != "off"
    if not is_encrypted and options.resolved.config.net.tls != "off":
        raise ConfigError(
            f"the run that {folder.path} has joined is not encrypted",
            cure="come back with --insecure if no encryption is what you want",
        )
    security = TicketSecurity(*authorities, mode=Mode.ON) if is_encrypted else None
    hello = stranger_hello(me, kept.terms.run_id, b"", certificate)
    return await _ask(kept.coordinators, hello, security), kept.coordinators


def _ways_to_peers(
    options: PeerOptions | CoordinatorOptions,
    folder: PeerFolder,
    me: PeerIdentity,
    admission: Admission,
    coordinators: tuple[str, ...],
    security: Security,
) -> tuple[Find, Dial]:
    """To whoever is in the run; the founder is at its coordinator's address before it is a member."""
    terms, known = admission.terms, list(admission.peers)
    is_first = True

    async def find() -> Sequence[str]:
        nonlocal is_first
        if not is_first:
            try:
                again, _ = await _join(options, folder, me, None)
                known[:] = again.peers
            except NobodyReachable:
                pass  # the peers may be there all the same
        is_first = False
        return (*known, *coordinators)

    async def dial(address: str) -> Channel:
        hello = hello_maker(me.ref, terms.run_id)(Purpose.STATE, 0, 1)
        return await connect(address, hello, timeout_s=_DIAL_TIMEOUT_S, security=security)

    return find, dial


async def _ask(addresses: tuple[str, ...], hello: Hello, security: TicketSecurity | None) -> Admission:
    return await ask_admission(
        addresses,
        hello,
        security=security,
        pause=lambda: asyncio.sleep(_RETRY_PAUSE_S),
        clock=asyncio.get_running_loop().time,
    )


def _members_security(me: PeerIdentity, admission: Admission, config: Config) -> Security:
    try:
        return own_security(me, admission.certificate, admission.terms, config.net.tls)
    except (ValueError, OSError) as error:  # an SSLError is one: the certificate is of another key
        raise Refused(f"the coordinator's answer does not fit this peer: {error}") from error


def _coordinators_security(
    me: PeerIdentity, founded: Founded, config: Config, kept: x509.Certificate | None
) -> Security:
    """By its own authority; but the heir of a run whose secret is lost shows the certificate that the members know."""
    terms = founded.terms
    first = certificate_from_bytes(terms.authorities[0])
    public_key = me.key.public_key()
    if kept is not None and key_in(kept) == public_key.public_bytes_raw() and is_signed_by(key_in(first), kept):
        return own_security(me, kept, terms, config.net.tls)
    certificate = authority_of(founded.run).issue(public_key, round(wall_s() * 1000))
    return own_security(me, certificate, terms, config.net.tls)

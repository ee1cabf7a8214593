"""What a process must know before its first socket is opened: the run's terms, its text, who is who.

    a founder     decides, or finds in its folder what it has decided before
    a joiner      asks whoever coordinates, and must have the same text
    a standby     asks as a joiner does, once; its folder remembers

Must not know listeners, peers or journals.
"""

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from typing import assert_never

from collective.core.types import PeerRef
from collective.transport import Security
from trainer.admission import RunTerms, ask_terms, member_security, stranger_security
from trainer.config import Config
from trainer.corpus import Corpus, load_corpus
from trainer.errors import Refused
from trainer.founding import Founded, found_or_go_on, recall_terms, remember_membership, stand_by, take_over
from trainer.identity import PeerFolder
from trainer.options import CoordinatorOptions, Founding, Joining, PeerOptions, StandingBy
from trainer.threads import in_thread
from trainer.ticket import Ticket, issue_token
from trainer.wiring import fragments_of

_RETRY_PAUSE_S = 1.0
_STANDBY_TOKEN_S = 86_400
"""Of the token that a standby makes for itself; two clocks may differ by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known before the first socket is opened. `founded` only where a coordinator lives; `corpus` not for a
    standby, which needs no text."""

    options: PeerOptions | CoordinatorOptions
    folder: PeerFolder
    me: PeerRef
    config: Config
    terms: RunTerms
    corpus: Corpus | None
    security: Security
    coordinators: tuple[str, ...]
    founded: Founded | None


async def prepare(options: PeerOptions | CoordinatorOptions, folder: PeerFolder) -> Start:
    """Find everything out.

    Raises:
        IsthmusError: what the operator must act on.
    """
    me = folder.start_identity().ref
    match options.role:
        case Founding(resume_dir=resume_dir, rebuild=rebuild):
            resolved = options.resolved if rebuild is None else options.resolved.adopt(take_over(folder))
            config = resolved.config
            fragments_of(config)  # what cannot be split is told before there is a run
            corpus = await in_thread(_read_corpus, config)
            founded = found_or_go_on(folder, config, corpus, resume_dir)
            return _start(options, folder, me, config, founded.terms, corpus, founded=founded)
        case Joining(ticket=ticket):
            terms = await _ask(options, ticket, me)
            config = options.resolved.adopt(terms.manifest).config
            corpus = await in_thread(_read_corpus, config)
            if corpus.digest != terms.data_digest:
                raise Refused(
                    f"the text here ({corpus.description}) is not the run's",
                    cure="use the same Python version, or name a copy of the run's text with --data",
                    fields=("data.path",),
                )
            remember_membership(folder, terms, ticket.addresses[0])
            return _start(options, folder, me, config, terms, corpus, coordinators=ticket.addresses)
        case StandingBy(ticket=ticket):
            # Whoever has the secret may ask at any time.
            token = issue_token(ticket.secret, ticket.run_id, round(wall_s()) + _STANDBY_TOKEN_S)
            lasting = dataclasses.replace(ticket, token=token)
            terms = recall_terms(folder, ticket.run_id) or await _ask(options, lasting, me)
            config = options.resolved.adopt(terms.manifest).config
            founded = stand_by(folder, terms, ticket.secret)
            return _start(options, folder, me, config, terms, None, founded=founded)
        case _:
            assert_never(options.role)


def _start(
    options: PeerOptions | CoordinatorOptions,
    folder: PeerFolder,
    me: PeerRef,
    config: Config,
    terms: RunTerms,
    corpus: Corpus | None,
    *,
    founded: Founded | None = None,
    coordinators: tuple[str, ...] = (),
) -> Start:
    return Start(
        options=options,
        folder=folder,
        me=me,
        config=config,
        terms=terms,
        corpus=corpus,
        security=member_security(me, terms, config.net.tls),
        coordinators=coordinators,
        founded=founded,
    )


async def _ask(options: PeerOptions | CoordinatorOptions, ticket: Ticket, me: PeerRef) -> RunTerms:
    security = stranger_security(ticket, options.resolved.config.net.tls)
    return await ask_terms(
        ticket,
        me,
        security=security,
        pause=lambda: asyncio.sleep(_RETRY_PAUSE_S),
        clock=asyncio.get_running_loop().time,
    )


def _read_corpus(config: Config) -> Corpus:
    return load_corpus(
        config.data_path,
        seq_len=config.model.decoder_config().max_seq_len,
        validation_fraction=config.data.validation_fraction,
        limit_nbytes=config.data.limit_nbytes,
    )


def wall_s() -> float:
    """Unix seconds, for tickets: they are the one thing that two clocks must agree on."""
    return time.time_ns() / 1e9

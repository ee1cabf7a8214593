# SPDX-License-Identifier: Apache-2.0
"""Which method suits a network and a model: predictions from arithmetic, losses from papers, a choice by rule.

An exchange is predicted as the collective layer makes it, on the slowest peer's link, b bytes a value in wire form:

    mean     2 (M - 1) / M · N · b  bytes each way, two trips       (slices, each reduced by its owner)
    gather     (M - 1)     · N · b  bytes each way, one trip        (every payload goes to everybody)
    pair                     N · b  bytes each way, one trip

A trip is half a round trip time. Not in the prediction: codecs' time, shared trunks, lost packets, peers that are late.
Measured exchanges take 1.1 to 1.3 times as long. An exchange is hidden if the workers never wait for it: it is done
before its delay is over, and all exchanges of a period fit into the period's compute.

Losses are differences from data parallel, of the published setting nearest to the model (`published.py`).

Rules: pure; nothing is measured here. It must not know: peers, sockets, configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from isthmus.optim import published
from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.outer import Op
from isthmus.optim.published import Penalty

if TYPE_CHECKING:
    from collections.abc import Iterator

CODEC_NBYTES: Final = {"raw": 4.0, "bf16": 2.0, "int8": 1.016, "e3m0": 0.516, "twobit": 0.266, "topk:64": 0.0293}
"""Bytes a value in wire form, scales and indices included: collective/README.md."""

MAX_DELAY: Final = 5
"""Inner steps that Streaming's exchanges may take: its paper's advice."""
LAYERS_A_FRAGMENT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The network, as the slowest peer sees it.

    Raises:
        ValueError: if a rate is not positive, or the round trip negative or not finite.
    """

    upload: float
    """Bytes/s."""
    download: float
    """Bytes/s."""
    round_trip_s: float

    def __post_init__(self) -> None:
        if not (self.upload > 0.0 and self.download > 0.0 and 0.0 <= self.round_trip_s < math.inf):
            raise ValueError(f"rates must be positive, the round trip finite and not negative, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained.

    Raises:
        ValueError: if a size is less than 1, or a step takes no time.
    """

    num_parameters: int
    inner_step_s: float
    """Seconds of one inner step of the slowest peer."""
    num_layers: int

    def __post_init__(self) -> None:
        if self.num_parameters < 1 or self.num_layers < 1 or not 0.0 < self.inner_step_s < math.inf:
            raise ValueError(f"sizes must be at least 1, and a step's seconds positive and finite, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One method with the settings that decide what it sends."""

    method: str
    """Its name in the registry."""
    inner_steps: int
    """H: each parameter is exchanged once in H inner steps. Of the methods with growing rounds, the shortest."""
    codec: str
    delay: int = 0
    """Inner steps from sending to receiving; 0: the workers wait."""
    num_fragments: int = 1
    """Into how many parts the parameters are split, each exchanged once in H steps."""
    nbytes_a_step: float
    """Sent by one peer, on average over its inner steps; it receives as much."""
    exchange_s: float
    """Predicted seconds of one exchange."""
    stall_s: float
    """Predicted seconds that the workers wait in a period of H steps."""
    utilisation: float
    """Share of the time that goes into inner steps."""
    penalty: Penalty

    @property
    def is_hidden(self) -> bool:
        """Whether the workers never wait."""
        return self.stall_s == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A choice among candidates."""

    pick: Candidate
    candidates: tuple[Candidate, ...]
    """All that were looked at, the pick among them."""


def recommend(links: Links, model: Model, peers: int) -> Recommendation:
    """Choose a method.

    Streaming DiLoCo, its H and codec the first of (30, int8), (30, e3m0), (100, int8), (100, e3m0) whose exchanges are
    hidden. Where none is, the link is slow: SparseLoCo, if its workers wait less.

    Args:
        links: the slowest peer's.
        model: what is trained.
        peers: M, >= 1.

    Raises:
        ValueError: if peers < 1.
    """
    if peers < 1:
        raise ValueError(f"peers must be at least 1, got {peers}")
    candidates = tuple(_candidates(links, model, peers))
    streaming = [candidate for candidate in candidates if candidate.method == "streaming"]
    pick = next((candidate for candidate in streaming if candidate.is_hidden), None)
    if pick is None:
        (sparse,) = (candidate for candidate in candidates if candidate.method == "sparseloco")
        pick = max((sparse, streaming[-1]), key=lambda candidate: candidate.utilisation)
    return Recommendation(pick=pick, candidates=candidates)


# ------------------------------------------------------------------------------------------------ predictions


def exchange_s(op: Op, nbytes: float, links: Links, peers: int) -> float:
    """Predicted seconds of one exchange.

    Args:
        op: how the payloads become one result.
        nbytes: of one peer's payload, in wire form.
        links: the slowest peer's.
        peers: how many take part.
    """
    if peers < 2:
        return 0.0
    trips = 2 if op is Op.MEAN else 1
    return sent_nbytes(op, nbytes, peers) / min(links.upload, links.download) + trips * links.round_trip_s / 2


def sent_nbytes(op: Op, nbytes: float, peers: int) -> float:
    """What one peer sends, and receives, in an exchange of payloads of `nbytes`."""
    others = peers - 1
    match op:
        case Op.MEAN:
            return 2 * nbytes * others / peers
        case Op.GATHER:
            return nbytes * others
        case Op.PAIR:
            return nbytes * min(others, 1)
        case _:
            assert_never(op)


def _candidates(links: Links, model: Model, peers: int) -> Iterator[Candidate]:
    """Every method at the settings for which something is known about its loss, or which its paper uses."""

    def candidate(
        method: str,
        inner_steps: int,
        codec: str,
        penalty: Penalty,
        *,
        delay: int = 0,
        op: Op = Op.MEAN,
        num_fragments: int = 1,
        vectors: float = 1.0,
    ) -> Candidate:
        # `vectors` are exchanged in a period: more than 1 where something else is exchanged too, as the inner
        # optimizer's states, or now and then the parameters beside the gradient.
        nbytes = model.num_parameters * CODEC_NBYTES[codec] / num_fragments
        num_exchanges = num_fragments * vectors
        sent = num_exchanges * sent_nbytes(op, nbytes, peers)
        seconds = exchange_s(op, nbytes, links, peers)
        compute_s = inner_steps * model.inner_step_s
        late_s = num_exchanges * max(0.0, seconds - delay * model.inner_step_s)
        stall_s = max(late_s, sent / min(links.upload, links.download) - compute_s)
        return Candidate(
            method=method,
            inner_steps=inner_steps,
            codec=codec,
            delay=delay,
            num_fragments=num_fragments,
            nbytes_a_step=sent / inner_steps,
            exchange_s=seconds,
            stall_s=stall_s,
            utilisation=compute_s / (compute_s + stall_s),
            penalty=penalty,
        )

    size = model.num_parameters
    means = CODEC_NBYTES["raw"] / CODEC_NBYTES["bf16"] / DataParallel().resync_steps
    yield candidate("data_parallel", 1, "bf16", Penalty(loss=0.0, setting="by definition"), vectors=1.0 + means)
    for codec in ("raw", "int8"):
        yield candidate("diloco", 30, codec, published.of_diloco(size, peers, codec))
    yield candidate("diloco", 100, "int8", Penalty(loss=None, setting="a 10B run in production, without a twin"))
    yield candidate("diloco", 500, "raw", published.DILOCO_500)
    for inner_steps in (30, 100):
        num_fragments = min(math.ceil(model.num_layers / LAYERS_A_FRAGMENT), inner_steps)
        for codec in ("int8", "e3m0"):
            nbytes = size * CODEC_NBYTES[codec] / num_fragments
            steps = math.ceil(exchange_s(Op.MEAN, nbytes, links, peers) / model.inner_step_s)
            yield candidate(
                "streaming",
                inner_steps,
                codec,
                published.of_streaming(size, inner_steps, codec),
                delay=min(max(steps, 1), MAX_DELAY),
                num_fragments=num_fragments,
            )
    yield candidate("eager", 30, "raw", published.EAGER, delay=30)
    yield candidate("delayed", 30, "raw", published.DELAYED, delay=30)
    yield candidate("sparseloco", 30, "topk:64", published.SPARSELOCO, op=Op.GATHER)
    # Parameters, first and second moments, every 256, 768 and 1536 steps: 1.5 vectors in 256.
    yield candidate("desloc", 256, "raw", published.DESLOC, vectors=1.5)
    yield candidate("local_adam", 256, "raw", published.LOCAL_ADAM, vectors=3.0)
    yield candidate("noloco", 50, "raw", published.NOLOCO, op=Op.PAIR)
    # As a mean among peers; through a server, as in the paper, N b / H go up and as much comes down.
    yield candidate("decoupled", 24, "bf16", published.DECOUPLED, delay=2, num_fragments=24)
    yield candidate("qsr", 500, "raw", published.QSR)
    yield candidate("autoloco", 500, "raw", published.AUTOLOCO)

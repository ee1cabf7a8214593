# SPDX-License-Identifier: Apache-2.0
"""A wire for `optim.simulate` that sends all through the codecs of the collective layer, and counts what they made.

    MEAN     cut by the collective's own plan (a butterfly with equal shares). A part is encoded on its way to the root
             of its slice; the root adds in fp32, its own part as it is, divides, encodes once, and everybody, the root
             too, decodes the same bytes. As collective/rounds/coded.py, additive weights included.
    GATHER   each payload once in its wire form, which everybody decodes, its sender too.
    PAIR     each payload once in its wire form.

Bytes are lengths of wire forms that exist. `formula_nbytes` says the same from the number of elements alone, written
down a second time from the documents of the formats; every exchange is held against it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, assert_never

import torch

from isthmus.collective.codec import Codec, codec_named
from isthmus.collective.core.slices import butterfly
from isthmus.collective.rounds.buffers import divide
from isthmus.collective.rounds.plan import RoundPlan, cut, share_out
from isthmus.optim.outer import Op
from isthmus.optim.workload import FP32_NBYTES, Delivery, draw_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from isthmus.optim.fragments import Fragment
    from isthmus.optim.outer import Round

CHUNK_NBYTES: Final = 2 << 20
"""The collective's default."""
NOTE_NBYTES: Final = 8
"""A note is a Python float."""


class CodecWire:
    """See the module.

    Args:
        codec: of the rounds that name none, as `codec_named` takes it.
    """

    def __init__(self, codec: str = "raw") -> None:
        self._default = codec
        self._codecs: dict[str, Codec] = {}
        self.payload_nbytes = 0.0
        """Wire forms of all payloads so far, of all workers."""
        self.sent_nbytes = 0.0
        """What all workers have sent so far."""

    def exchange(
        self, round_: Round, fragment: Fragment, payloads: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> Delivery:
        """See Wire.

        Raises:
            NotFinite: a payload holds NaN or infinity: the run has diverged.
            RuntimeError: the wire forms have another length than the formula says.
        """
        del fragment
        codec = self._codec(round_.codec or self._default)
        match round_.op:
            case Op.MEAN:
                delivery, formula = self._mean(codec, payloads, weights)
            case Op.GATHER:
                delivery, formula = self._gather(codec, payloads)
            case Op.PAIR:
                delivery, formula = self._pair(codec, payloads, draw_pairs(round_, list(payloads)))
            case _:
                assert_never(round_.op)
        counted = (delivery.payload_nbytes, delivery.sent_nbytes)
        if any(abs(count - expected) > 1e-6 for count, expected in zip(counted, formula, strict=True)):
            raise RuntimeError(f"{round_.op} of {codec.name}: counted {counted} bytes, the formula says {formula}")
        delivery = _with_notes(delivery, round_, len(payloads))
        self.payload_nbytes += delivery.payload_nbytes * len(payloads)
        self.sent_nbytes += delivery.sent_nbytes * len(payloads)
        return delivery

    def _codec(self, name: str) -> Codec:
        if name not in self._codecs:
            self._codecs[name] = codec_named(name)
        return self._codecs[name]

    # -------------------------------------------------------------------------------- the three ways

    def _mean(
        self, codec: Codec, payloads: Mapping[str, Tensor], weights: Mapping[str, float]
    ) -> tuple[Delivery, tuple[float, float]]:
        names, rows = list(payloads), list(payloads.values())
        plan = _plan(rows[0].numel(), len(rows))
        result = torch.empty_like(rows[0])
        # What the root of a slice adds of its own is not encoded; the rest of this is overwritten.
        delivered = dict(payloads) if codec.is_identity else {name: row.clone() for name, row in payloads.items()}
        payload_nbytes, sent_nbytes, formula = 0, 0, 0
        for root, root_name in enumerate(names):
            others = [name for name in names if name != root_name]
            for chunk in plan.slices.chunks_of(root):
                span = slice(plan.starts[chunk], plan.starts[chunk + 1])
                numel = plan.numel_of(chunk)
                total = result[span]
                torch.mul(payloads[root_name][span], weights[root_name], out=total)
                for name in others:
                    wire = _encoded(codec, payloads[name][span])
                    codec.check(wire, numel)
                    codec.accumulate(wire, weights[name], total, 1.0, total)
                    if not codec.is_identity:
                        codec.decode(wire, delivered[name][span])
                    sent_nbytes += len(wire)
                divide(total, sum(weights.values()))
                wire = _encoded(codec, total)
                codec.check(wire, numel)
                codec.decode(wire, total)
                sent_nbytes += len(others) * len(wire)
                payload_nbytes += len(wire)
                formula += formula_nbytes(codec.name, numel)
        values = dict.fromkeys(payloads, result)
        delivery = Delivery(
            values=values,
            delivered=delivered,
            partners={},
            payload_nbytes=float(payload_nbytes),
            sent_nbytes=sent_nbytes / len(rows),
        )
        return delivery, (float(formula), 2 * formula * (len(rows) - 1) / len(rows))

    def _gather(self, codec: Codec, payloads: Mapping[str, Tensor]) -> tuple[Delivery, tuple[float, float]]:
        delivered, nbytes = self._round_trip(codec, payloads)
        others = len(payloads) - 1
        delivery = Delivery(
            values=dict.fromkeys(payloads, torch.stack(list(delivered.values()))),
            delivered=delivered,
            partners={},
            payload_nbytes=nbytes,
            sent_nbytes=others * nbytes,
        )
        formula = formula_nbytes(codec.name, next(iter(payloads.values())).numel())
        return delivery, (float(formula), float(others * formula))

    def _pair(
        self, codec: Codec, payloads: Mapping[str, Tensor], partners: Mapping[str, str]
    ) -> tuple[Delivery, tuple[float, float]]:
        delivered, nbytes = self._round_trip(codec, payloads)
        share = len(partners) / len(payloads)
        delivery = Delivery(
            values={name: delivered[partner] for name, partner in partners.items()},
            delivered=delivered,
            partners=partners,
            payload_nbytes=nbytes,
            sent_nbytes=share * nbytes,
        )
        formula = formula_nbytes(codec.name, next(iter(payloads.values())).numel())
        return delivery, (float(formula), share * formula)

    def _round_trip(self, codec: Codec, payloads: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], float]:
        """What everybody decodes, and the mean length of the wire forms."""
        delivered, nbytes = {}, 0
        for name, payload in payloads.items():
            wire = _encoded(codec, payload)
            codec.check(wire, payload.numel())
            delivered[name] = torch.empty_like(payload)
            codec.decode(wire, delivered[name])
            nbytes += len(wire)
        return delivered, nbytes / len(payloads)


@functools.lru_cache(maxsize=64)
def _plan(numel: int, world_size: int) -> RoundPlan:
    shares = [1.0 / world_size] * world_size
    return cut(share_out(numel, shares), butterfly(world_size), item_nbytes=FP32_NBYTES, chunk_nbytes=CHUNK_NBYTES)


def _encoded(codec: Codec, values: Tensor) -> Tensor:
    return codec.encode(values, torch.empty(codec.wire_nbytes(values.numel()), dtype=torch.uint8))


def _with_notes(delivery: Delivery, round_: Round, world_size: int) -> Delivery:
    """Notes go to everybody beside the payload."""
    nbytes = NOTE_NBYTES * round_.num_notes
    return Delivery(
        values=delivery.values,
        delivered=delivery.delivered,
        partners=delivery.partners,
        payload_nbytes=delivery.payload_nbytes + nbytes,
        sent_nbytes=delivery.sent_nbytes + nbytes * (world_size - 1),
    )


def formula_nbytes(codec: str, numel: int) -> int:
    """Length of a wire form, from the documents of the formats alone.

        raw 32 bits an element      bf16 16 bits      int8 8, e3m0 4, twobit 2 bits, and 32 for each 256 begun
        topk:k   of each 4096 begun 64 bits, and 14 bits for each of the k (of a last, short one: its part of k) kept;
                 indices in pairs, codes in fours, filled up to 4 bytes

    Raises:
        ValueError: there is no formula for this codec.
    """
    kind, _, number = codec.partition(":")
    blocks = -(-numel // 256)
    match kind:
        case "raw":
            return 4 * numel
        case "bf16":
            return 2 * numel
        case "int8":
            return numel + 4 * blocks
        case "e3m0":
            return -(-numel // 2) + 4 * blocks
        case "twobit":
            return -(-numel // 4) + 4 * blocks
        case "topk":
            per_chunk = int(number or "64")
            chunks, rest = divmod(numel, 4096)
            kept = chunks * per_chunk + -(-per_chunk * rest // 4096)
            levels = 8 * (chunks + (rest > 0))
            return -(-(levels + -(-kept // 4) + 3 * -(-kept // 2)) // 4) * 4
        case _:
            raise ValueError(f"no formula for codec {codec!r}")

# SPDX-License-Identifier: Apache-2.0
"""Results of rounds as they are recorded, for learners and for the disk; and read again.

It must not know states, or how a round travelled.
"""

import math

import torch
from blake3 import blake3
from torch import Tensor

from isthmus.collective import decode_result
from isthmus.collective.codec import codec_named
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.state.replica import ResultChunk, RoundRecord
from isthmus.optim.outer import Op, Result, Round


def sealed(record: RoundRecord) -> RoundRecord:
    """The same with a digest in the place of its values: for a fragment of which nothing is shared."""
    digest = blake3()
    for chunk in record.chunks:
        digest.update(chunk.start_numel.to_bytes(8, "big"))
        digest.update(chunk.data)
    seal = ResultChunk(0, digest.digest())
    return RoundRecord(record.codec, record.weights, record.notes, (seal,))


def result_of(record: RoundRecord, value: Tensor) -> Result | None:
    """The result that was recorded, with its values; None if nobody gave anything."""
    if not record.weights:
        return None
    weights = tuple(weight for _, weight in record.weights)
    return Result(
        value=value,
        members=tuple(str(peer) for peer, _ in record.weights),
        weight_sum=math.fsum(weights),
        weights=weights,
        notes=record.notes,
    )


def read_record(round_: Round | None, record: RoundRecord | None, *, numel: int, out: Tensor | None) -> Result | None:
    """A recorded result, decoded.

    Args:
        round_: as planned; None if there are more records than rounds.
        record: None if there are fewer.
        numel: elements of a payload; 0 if its values are not recorded.
        out: [numel], where a mean goes; None: new memory.

    Raises:
        RemoteProtocolError: it does not fit the round.
    """
    if round_ is None or record is None:
        raise RemoteProtocolError("a recorded step has not as many results as the plan has rounds")
    num_members = len(record.weights)
    if len(record.notes) != (num_members if round_.num_notes else 0):
        raise RemoteProtocolError("a recorded result has not a note of each member")
    if any(len(notes) != round_.num_notes for notes in record.notes):
        raise RemoteProtocolError("a recorded result has other notes than its round")
    if not record.weights or not numel or round_.op is Op.PAIR:
        return result_of(record, torch.empty(0))
    try:
        if round_.op is Op.GATHER:
            return result_of(record, _read_rows(record, numel))
        value = torch.empty(numel) if out is None else out
        ends = [chunk.start_numel for chunk in record.chunks[1:]] + [numel]
        for chunk, end in zip(record.chunks, ends, strict=False):
            decode_result(record.codec, chunk.start_numel, end - chunk.start_numel, chunk.data, value)
        return result_of(record, value)
    except ValueError as error:  # the donor's fault, not ours
        raise RemoteProtocolError("a recorded result does not fit") from error


def _read_rows(record: RoundRecord, numel: int) -> Tensor:
    """[members, numel]. As many bytes have come as that takes in wire form."""
    nbytes = codec_named(record.codec).wire_nbytes(numel)
    if [len(chunk.data) for chunk in record.chunks] != [nbytes] * len(record.weights):
        raise RemoteProtocolError("a recorded gather has not a payload of each member")
    rows = torch.empty(len(record.weights), numel)
    for row, chunk in zip(rows, record.chunks, strict=True):
        decode_result(record.codec, 0, numel, chunk.data, row)
    return rows

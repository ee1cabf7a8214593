# SPDX-License-Identifier: Apache-2.0
"""Lies of a peer's trainer: about its numbers, its work and its samples."""

import dataclasses
import os
from typing import Any

HUGE_TOKENS = 10**12
NOISE = 100.0
HUGE = 3e38
AGAINST = -5.0
LENGTHENED = 1e6
ALL_SAMPLES = 2**31
CLAIMED_SAMPLES = 2**20


def send_noise() -> None:
    """Change what a worker hands in, as `_spoil` does, into noise."""
    import torch

    def spoil(mailbox: torch.Tensor, _began: torch.Tensor) -> None:
        mailbox.add_(torch.randn(mailbox.shape), alpha=NOISE)

    _spoil(spoil)


def send_huge_numbers() -> None:
    """Numbers whose weighted sum is beyond the largest fp32."""
    _spoil(lambda mailbox, _began: mailbox.fill_(HUGE))


def work_against_the_others() -> None:
    """Hand in −5 times the difference."""
    _spoil(lambda mailbox, began: mailbox.sub_(began).mul_(AGAINST).add_(began))


def _spoil(spoil: Any) -> None:
    """Change the mailbox, given what was loaded into it before. Workers of this process are forks of it."""
    import torch

    from isthmus.trainer.workers.inner_loop import InnerLoop

    store, load = InnerLoop.store, InnerLoop.load
    began = torch.empty(0)

    def remember(self: InnerLoop, mailbox: torch.Tensor, *arguments: Any, **more: Any) -> int:
        nonlocal began
        num_broken = load(self, mailbox, *arguments, **more)
        began = mailbox.clone()
        return num_broken

    def store_spoilt(self: InnerLoop, mailbox: torch.Tensor, *arguments: Any, **more: Any) -> None:
        store(self, mailbox, *arguments, **more)
        spoil(mailbox, began)

    InnerLoop.store, InnerLoop.load = store_spoilt, remember  # type: ignore[method-assign, assignment]


def claim_a_huge_weight() -> None:
    """Say that each step trained on a million million tokens, and send noise."""
    from isthmus.trainer.workers.step import PendingStep

    send_noise()
    result = PendingStep.result

    def claim(self: PendingStep) -> Any:
        return dataclasses.replace(result(self), num_tokens=HUGE_TOKENS)

    PendingStep.result = claim  # type: ignore[method-assign]


def claim_all_leases() -> None:
    """Lease as much as can be had, let the trainer see half of it, claim the rest as used up, and send noise."""
    from isthmus.elastic.core.lease_desk import LeaseDesk
    from isthmus.elastic.core.leases import count
    from isthmus.elastic.core.messages import IndexRange
    from isthmus.elastic.core.place import Place

    send_noise()
    want, take, hand_in = LeaseDesk.want, LeaseDesk.take, Place.take_payload
    unused: list[IndexRange] = []

    def want_all(self: LeaseDesk, num_samples: int, epoch: Any) -> Any:
        return want(self, ALL_SAMPLES if num_samples else 0, epoch)

    def take_half(self: LeaseDesk, grant: Any) -> Any:
        ranges = take(self, grant)
        if ranges:
            *first, last = ranges
            middle = min((last.start + last.stop) // 2, last.start + 10_000)
            unused.append(IndexRange(middle, last.stop))
            ranges = (*first, IndexRange(last.start, middle))
        return ranges

    def claim(self: Place, payload: Any) -> bool:
        pretended = [IndexRange(item.start, min(item.stop, item.start + CLAIMED_SAMPLES)) for item in unused]
        unused[:] = [IndexRange(done.stop, item.stop) for done, item in zip(pretended, unused, strict=True)]
        unused[:] = [item for item in unused if len(item)]
        if payload.num_tokens and pretended:
            used = count(payload.consumed)
            num_tokens = payload.num_tokens // used * (used + count(pretended))
            consumed = (*payload.consumed, *pretended)
            payload = dataclasses.replace(payload, weight=float(num_tokens), num_tokens=num_tokens, consumed=consumed)
        return hand_in(self, payload)

    LeaseDesk.want, LeaseDesk.take = want_all, take_half  # type: ignore[method-assign]
    Place.take_payload = claim  # type: ignore[method-assign]


def claim_a_long_difference() -> None:
    """With Decoupled: say that the difference is a million times as long."""
    from isthmus.optim.decoupled import DecoupledDiLoCo
    from isthmus.optim.outer import Emitted

    emit = DecoupledDiLoCo.emit

    def lengthen(self: DecoupledDiLoCo, *arguments: Any, **more: Any) -> Emitted:
        made = emit(self, *arguments, **more)
        return dataclasses.replace(made, notes=(LENGTHENED * made.notes[0],))

    DecoupledDiLoCo.emit = lengthen  # type: ignore[method-assign]


def vote_for_another_state() -> None:
    """Vote for another state than was computed, in every round."""
    from isthmus.trainer.engine.outer_step_runner import OuterStepRunner

    exchange = OuterStepRunner.exchange

    async def deny(self: OuterStepRunner, *arguments: Any) -> Any:
        made: Any = await exchange(self, *arguments)
        return dataclasses.replace(made, digest=os.urandom(32))

    OuterStepRunner.exchange = deny  # type: ignore[method-assign]

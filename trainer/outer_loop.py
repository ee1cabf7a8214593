# SPDX-License-Identifier: Apache-2.0
"""The drop-in: an outer optimizer around somebody's own training loop.

    with BlockingCommunicator(rank, addresses[rank], secret=secret) as communicator:
        communicator.install(view_of(0, addresses))
        with OuterLoop(model, optimizer, communicator, DiLoCo(inner_steps=50)):
            for batch in batches:  # the loop as it was
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

Torch's own hooks around `optimizer.step` do the rest, in the order that optim/outer.py states: before it, rounds of
gradients; after it, all others of the plan. Rounds with a delay travel while the loop goes on.

Rules: all members of the view make the same number of steps. Whatever breaks, a round ends within its deadline, is
absorbed by all or dropped by all, and training goes on (outer_exchange.py says how, outer_engine.py mends the rest).
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isthmus.collective.api.blocking import BlockingCommunicator
from isthmus.collective.errors import CollectiveError, OperationAborted
from isthmus.optim.outer import ANCHOR, GRAD, PARAM, Outer, Work
from isthmus.trainer.outer_engine import OuterEngine, by_work
from isthmus.trainer.outer_exchange import Exchanger
from isthmus.trainer.outer_values import LocalValues

_MEETING: Final = 32_000
"""Fragments of keys from here on are the loop's own; from 32768 on they are the communicator's."""
_FIRST_PARAMETERS: Final = _MEETING + 1
_ANSWERS: Final = _MEETING + 2
_MAX_ANSWERS: Final = 700
"""Questions that members may ask each other after one inner step."""
_DIGEST_NBYTES: Final = 32


class OuterLoop:
    """A context in which `optimizer.step()` is an inner step of `method`.

    On entering, all members of the view must hold equal trainable parameters: by default the first member's are sent
    to all. They need the same model and method; that is checked. Frozen parameters and buffers are not exchanged.
    One view serves one `with`, since keys are used once. In it all members call `optimizer.step()` equally often.
    Where fp16's GradScaler skips a call on one peer, the peers fall out of step: use bf16. Gradients are clipped by the
    loop before they are averaged, if the method averages gradients at all.

    The group is whatever view is installed. To go on without a member, install a view without it, the same on all that
    live, in `on_abort` or from another thread: rounds that this breaks are made again in it. A round that breaks in a
    view that stays is dropped by all, and the next one carries its work. Members that are new, or return, are elastic's
    business (`isthmus join`); here they cannot enter while others train. End the loop on all, install a view of all,
    and enter again: from checkpoints of the same inner step, or anew.

    Args:
        model: whole on this peer, on any device, in any floating dtype.
        optimizer: the inner one. `step` may get a closure unless the method exchanges gradients.
        communicator: with a view installed that holds this peer.
        method: any outer optimizer of `optim`, with the same settings on all members.
        batch_size: samples that this peer trains on in one inner step, accumulated ones included.
        weigh: this peer's weight in a round, from its id and its work; `optim.simulate.one_each` is another.
        codec: of rounds whose method names none; see collective/codec.
        deadline_s: longest wait for the others: on entering, and in a round that is due.
        broadcast_parameters: whether the first member's parameters are sent to all; else they must be equal.
        on_abort: called in this thread when a round broke in the view that is installed. The error's `suspects` are
            the peers that are gone. It may install a view without them.

    Raises:
        ValueError: the method cannot split this model, or an argument is not as described.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        communicator: BlockingCommunicator,
        method: Outer,
        *,
        batch_size: float = 1.0,
        weigh: Callable[[str, Work], float] = by_work,
        codec: str = "raw",
        deadline_s: float = 600.0,
        broadcast_parameters: bool = True,
        on_abort: Callable[[OperationAborted], None] | None = None,
    ) -> None:
        if not batch_size > 0.0:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self._values = LocalValues(model, optimizer)
        self._engine = OuterEngine(method, self._values, batch_size=batch_size, weigh=weigh, on_abort=on_abort)
        self._optimizer, self._communicator = optimizer, communicator
        self._codec, self._deadline_s, self._broadcasts = codec, deadline_s, broadcast_parameters
        self._exchanger: Exchanger | None = None
        self._hooks: list[Any] = []
        self._inner_step = 0
        self._num_answers = 0

    def __enter__(self) -> Self:
        """Meet the other members, agree on the parameters, emit what the method wants before the first step.

        Raises:
            ValueError: no view is installed, or members differ in model, method, parameters or checkpoint.
            CollectiveError: a member did not come in time, or the view was used before.
        """
        exchanger = Exchanger(self._communicator, codec=self._codec, deadline_s=self._deadline_s)
        try:
            self._meet(exchanger)
        except CollectiveError as error:
            error.add_note("to enter an OuterLoop all members of the view must come, and none may have used it before")
            raise
        self._engine.begin(exchanger)
        self._exchanger = exchanger
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the hooks away, and leave alone what is under way."""
        for hook in self._hooks:
            hook.remove()
        self._engine.end()
        self._exchanger = None

    # -------------------------------------------------------------------------------- what is known

    @property
    def inner_step(self) -> int:
        """Inner steps since the run began."""
        return self._inner_step

    @property
    def outer_step(self) -> int:
        """Rounds absorbed, of all fragments: the same on all members after the same inner step."""
        return self._engine.history.num_rounds

    @property
    def num_dropped(self) -> int:
        """Rounds dropped since this object was made."""
        return self._engine.num_dropped

    def shared_digest(self) -> str:
        """BLAKE2b of the shared state of all fragments: the same on all members after the same inner step."""
        return self._engine.shared_digest()

    def shared_agrees(self) -> bool:
        """Whether all members have the same shared state. All must ask, after the same inner step.

        Raises:
            CollectiveError: a member did not answer.
        """
        return self._agree(self.shared_digest())

    def parameters_agree(self) -> bool:
        """Whether the bits of all members' trainable parameters are the same, as after a blocking DiLoCo round.

        All members must ask, after the same inner step.

        Raises:
            CollectiveError: a member did not answer.
        """
        return self._agree(self._values.digest())

    def shared_parameters(self) -> dict[str, Tensor]:
        """The trainable parameters that the run stands for, fp32 on the CPU: better than one worker's to evaluate.

        They are the anchor; this peer's own where the method has none. `model.load_state_dict(_, strict=False)` takes
        them.
        """
        found: dict[str, Tensor] = {}
        engine, whole = self._engine, self._values.table.whole()
        for fragment in [each for each in engine.fragments.values() if each.kind == PARAM] or [whole]:
            state = engine.states.get(fragment.key)
            has_anchor = state is not None and ANCHOR in state.shared
            value = state.shared[ANCHOR].clone() if state and has_anchor else self._values.gather(fragment)
            found.update(fragment.views(value))
        return found

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What the loop remembers: shared and private state, counters, payloads of rounds under way. Copies.

        Every peer saves its own, after the same inner step, beside its model and its optimizer.
        """
        return {"inner_step": self._inner_step, **self._engine.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; before entering. Model and optimizer are restored by the caller.

        Rounds that were under way are started again on entering.

        Raises:
            RuntimeError: the loop is entered.
            ValueError: it is the checkpoint of another model or method.
        """
        if self._exchanger is not None:
            raise RuntimeError("load the checkpoint before the with statement")
        self._engine.load_state_dict(saved)
        self._inner_step = saved["inner_step"]

    # -------------------------------------------------------------------------------- inside

    def _before_step(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._inner_step + 1
        if any(round_.fragment.kind == GRAD for round_ in self._engine.method.plan(step)):
            if any(map(callable, args[1:])) or kwargs.get("closure") is not None:
                raise ValueError(
                    f"{type(self._engine.method).__name__} exchanges gradients: call optimizer.step() bare"
                )
            self._engine.run(step, of_gradient=True)

    def _after_step(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        self._inner_step += 1
        self._num_answers = 0
        self._engine.run(self._inner_step, of_gradient=False)

    def _meet(self, exchanger: Exchanger) -> None:
        """Find out, before anything else, whether all members are about to do the same."""
        is_new = not self._engine.states
        if not is_new:
            state = f"{self._inner_step} {self._engine.history} {self.shared_digest()}"
        else:
            state = "" if self._broadcasts else self._values.digest()
        terms = [
            f"{_terms_of(self._engine.method)} {self._codec}",
            repr(self._values.table),
            str(is_new),
            str(self._broadcasts),
            state,
        ]
        row = torch.cat([_digest_of(term) for term in terms])
        rows = exchanger.gather(0, _MEETING, row)
        faults = (
            "another method, codec or other settings: give all members the same",
            "other parameters, by name or shape: build the same model on all members",
            "a checkpoint or none where this one has not: load one of the same inner step on all members, or on none",
            "another broadcast_parameters: give all members the same",
            "other parameters: seed all alike, or leave broadcast_parameters at True"
            if is_new
            else "a checkpoint of another moment: load one of the same inner step on all members",
        )
        for member, theirs in zip(exchanger.view.members, rows, strict=True):
            for fault, our_part, their_part in zip(
                faults, torch.split(row, _DIGEST_NBYTES), torch.split(theirs, _DIGEST_NBYTES), strict=True
            ):
                if not torch.equal(our_part, their_part):
                    raise ValueError(f"member {member.peer_id} has {fault}")
        if is_new and self._broadcasts:
            whole = self._values.table.whole()
            parameters = self._values.gather(whole)
            exchanger.broadcast(0, _FIRST_PARAMETERS, parameters)
            self._values.move(whole, parameters, 0.0)

    def _agree(self, digest: str) -> bool:
        if self._exchanger is None:
            raise RuntimeError("members are asked inside the with statement")
        if self._num_answers == _MAX_ANSWERS:
            raise RuntimeError(f"members may be asked {_MAX_ANSWERS} times after one inner step")
        fragment = _ANSWERS + self._num_answers
        self._num_answers += 1
        row = _digest_of(digest)
        return all(torch.equal(row, theirs) for theirs in self._exchanger.gather(self._inner_step, fragment, row))


def _terms_of(method: Outer) -> str:
    """Its type and settings, without addresses in memory."""
    return f"{type(method).__qualname__} {re.sub(r' at 0x[0-9a-f]+', '', repr(method))}"


def _digest_of(text: str) -> Tensor:
    """[32] uint8."""
    return torch.tensor(list(hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).digest()), dtype=torch.uint8)

# SPDX-License-Identifier: Apache-2.0
"""This peer's copy of the shared state: live, staged for a commit, pinned for learners.

A version of the state is never changed once it is live. An outer step moves the fragments of its rounds: it writes
their next state into spare memory (`stage`) and shares all others with the version before. A commit makes the staged
version the live one (`install_staged`), an abort forgets it (`discard_staged`). A donor pins the version it serves:
what is in a pinned version is not recycled, and only then does the next stage allocate.

Memory, in copies of the parameters for DiLoCo: live 2, spare 2 (the mean is received straight into one of them, and a
state that is being fetched into both), 2 more for every older version that is still pinned. With several fragments
spare memory is that of the fragments of one outer step, and a pinned version keeps only what is no longer live; a state
that is being fetched takes 2 for as long as that lasts. Spare memory that was staged in vain keeps its digests: what is
right in it need not be fetched.

It must not know the network, views or workers.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from isthmus.collective.core.types import OuterStep
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.errors import StateDiverged, StateMismatch
from isthmus.elastic.state.digest import Hasher, StateManifest, TensorManifest, describe_state, digest_of
from isthmus.elastic.state.replica import CommitEntry, RoundRecord
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import ANCHOR, PARAM, Op, Outer, Result, Round, Tensors, is_elementwise
from isthmus.optim.outer_plan import OuterPlan
from isthmus.trainer.engine.round_records import read_record
from isthmus.trainer.engine.spare_memory import SpareMemory
from isthmus.trainer.engine.state_version import (
    CHAIN,
    Version,
    byte_view,
    name_tensors,
    next_chain,
    shared_part,
    with_chain,
)
from isthmus.trainer.threads import in_thread

_NUMEL_NBYTES = 4
"""Of an fp32 element."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundOutcome:
    """What a committed round did to its fragment: what a worker's `settle` is told."""

    round_: Round
    place: int
    """Of the fragment, among all."""
    result: Result | None
    """Its value is kept only if the round says so."""
    before: Tensors
    after: Tensors


@dataclass(slots=True, kw_only=True, eq=False)
class _Staged:
    version: Version
    outcomes: tuple[RoundOutcome, ...] = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Restoring:
    """Memory of a whole state that is being filled, and how it was handed out."""

    states: tuple[Tensors, ...]
    names: tuple[str, ...]
    destinations: tuple[memoryview, ...]


class OuterState:
    """The shared state of all fragments, and the replica that elastic sees.

    Args:
        outer: the method, fitted.
        fragments: what is exchanged; of each kind they hold each parameter in exactly one of them.
        plan: which rounds make which outer step.
        hasher: makes the manifests; its threads are the caller's to close.
    """

    def __init__(self, outer: Outer, fragments: Sequence[Fragment], plan: OuterPlan, hasher: Hasher) -> None:
        self._outer = outer
        self.fragments = tuple(fragments)
        """In the method's order."""
        self.places = {fragment.key: place for place, fragment in enumerate(self.fragments)}
        """Where a fragment stands among them."""
        self._plan = plan
        self._hasher = hasher
        self._live: Version | None = None
        self._versions: list[Version] = []  # the live one, and those that are pinned
        self._staged: _Staged | None = None
        self._spare = SpareMemory(self.fragments)
        self._restoring: _Restoring | None = None
        self._hashed: dict[int, tuple[bytes, ...]] = {}  # by tensor: of what was hashed as it was staged
        self.on_replayed: Callable[[bytes, CommitEntry], None] | None = None
        """Told of every commit that was replayed, and of the digest of the state that it was applied to."""

    def lend(self, memory: Sequence[Tensor]) -> None:
        """Tensors, [numel], where whole anchors are to be made: workers read them there (`SharedBuffer.anchors`)."""
        self._spare.lend(memory)

    # -------------------------------------------------------------------------------- reading

    @property
    def live(self) -> Version:
        """The committed state.

        Raises:
            AssertionError: if nothing is held yet (our bug: the member machine knows).
        """
        assert self._live is not None, "no shared state is held yet"
        return self._live

    def held(self) -> Held | None:
        """What is held, or None before the first state."""
        return None if self._live is None else self._live.held

    def parameters_in(self, name: str, start_nbytes: int, stop_nbytes: int) -> tuple[str, ...]:
        """The model's parameters that a range of a shared tensor belongs to; none if it is not laid out as they are."""
        tensor = self.live.tensors[name]
        for fragment, state in zip(self.fragments, self.live.states, strict=True):
            if tensor.numel() == fragment.numel and any(tensor is own for own in state.values()):
                start, stop = start_nbytes // _NUMEL_NBYTES, -(-stop_nbytes // _NUMEL_NBYTES)
                return fragment.names_in(start, stop)
        return ()

    # -------------------------------------------------------------------------------- making states

    async def adopt(self, outer_step: int, tensors: Mapping[str, Tensor], *, digest: bytes | None = None) -> Held:
        """Make these tensors the live state: a checkpoint's.

        Args:
            outer_step: of the state.
            tensors: copied, fp32.
            digest: what the members voted for, if known.

        Raises:
            StateMismatch: if names or sizes are not those of this method and model, or the digest is another.
        """
        states = tuple(map(self._new_state, self.fragments))
        own = name_tensors(self.fragments, states)
        given = {name: tensor.numel() for name, tensor in tensors.items()}
        ours = {name: tensor.numel() for name, tensor in own.items()}
        if given != ours:
            raise StateMismatch(f"the state holds {given}, this model and method need {ours}")
        for name, tensor in own.items():
            tensor.copy_(tensors[name].view(-1))
        manifest = await self._describe(outer_step, own)
        if digest is not None and manifest.digest != digest:
            raise StateMismatch(f"the state of outer step {outer_step} is not the one that was committed")
        return self._go_live(self._version(states, manifest))

    async def found(self, parameters: Tensor) -> Held:
        """Make the run's first state from initial parameters, the flat vector."""
        states = tuple(self._first_state(part, parameters) for part in self.fragments)
        manifest = await self._describe(0, name_tensors(self.fragments, states))
        return self._go_live(self._version(states, manifest))

    def _first_state(self, fragment: Fragment, parameters: Tensor) -> Tensors:
        made = with_chain(self._outer.init(fragment, _first_value(fragment, parameters)))
        state = self._spare.fresh(made)
        for name, tensor in state.items():
            tensor.copy_(made[name])
        return state

    def _new_state(self, fragment: Fragment) -> Tensors:
        """Memory of a fragment's state, with any content."""
        return self._spare.fresh(with_chain(self._outer.init(fragment, torch.empty(fragment.numel, device="meta"))))

    def _version(self, states: tuple[Tensors, ...], manifest: StateManifest) -> Version:
        return Version(fragments=self.fragments, states=states, manifest=manifest, when_idle=self._recycle)

    async def _describe(
        self, outer_step: int, tensors: Mapping[str, Tensor], before: Version | None = None
    ) -> StateManifest:
        """Hash what is not the very memory of a version that was hashed before."""
        parts: dict[str, TensorManifest] = {}
        if before is not None and before.manifest.chunk_nbytes == self._hasher.chunk_nbytes:
            same = (name for name, tensor in tensors.items() if before.tensors[name] is tensor)
            known = before.parts()
            parts = {name: known[name] for name in same}
        for name, tensor in tensors.items():
            if name not in parts and (chunks := self._hashed.pop(id(tensor), None)) is not None:
                parts[name] = TensorManifest(name, tensor.nbytes, chunks)
        others = [(name, byte_view(tensor)) for name, tensor in tensors.items() if name not in parts]
        parts |= {part.name: part for part in await self._hasher.describe_async(others)}
        return describe_state(
            OuterStep(outer_step), [parts[name] for name in tensors], chunk_nbytes=self._hasher.chunk_nbytes
        )

    # -------------------------------------------------------------------------------- one outer step

    def next_rounds(self) -> tuple[Round, ...]:
        """The rounds that follow the live state."""
        return self._plan.rounds(self.live.manifest.outer_step + 1)

    def mean_buffer(self, round_: Round) -> Tensor:
        """Where the mean of one of `next_rounds` goes, [numel]: the next state's own memory where that will do."""
        place = self.places[round_.fragment]
        numel = self.fragments[place].numel if round_.numel is None else round_.numel
        spare = self._next_memory(place)
        if round_.keeps_value or ANCHOR not in spare or spare[ANCHOR].numel() != numel:
            return torch.empty(numel)
        return spare[ANCHOR]

    def _next_memory(self, place: int) -> Tensors:
        """Where the next state of a fragment goes."""
        if self._restoring is not None and not self._spare.has(place):
            # What a broken transfer has brought is worth less than a third copy of the state costs.
            self._spare.give(dict(enumerate(self._restoring.states)))
            self._restoring = None
        return self._spare.reserve(place, like=self.live.states[place])

    async def stage(self, results: Sequence[tuple[Result | None, RoundRecord]]) -> bytes:
        """Step the fragments of `next_rounds` in staging. The live state is untouched.

        Args:
            results: of these rounds, in their order. None: nobody gave anything, and the fragment stays as it is.

        Returns:
            The digest that the shared state would have.
        """
        live, rounds = self.live, self.next_rounds()
        self._hashed.clear()
        outcomes = [
            await in_thread(self._step, round_, result, record)
            for round_, (result, record) in zip(rounds, results, strict=True)
        ]
        states = list(live.states)
        for outcome in outcomes:
            states[outcome.place] = outcome.after
        named = name_tensors(self.fragments, states)
        manifest = await self._describe(live.manifest.outer_step + 1, named, live)
        known = tuple(replace(outcome, after=shared_part(outcome.after)) for outcome in outcomes)
        self._staged = _Staged(version=self._version(tuple(states), manifest), outcomes=known)
        return manifest.digest

    def _step(self, round_: Round, result: Result | None, record: RoundRecord) -> RoundOutcome:
        place = self.places[round_.fragment]
        state = self.live.states[place]
        after, before = state, shared_part(state)
        if CHAIN in state and record.weights:  # of a pair others have met, whoever had no partner
            after = next_chain(state, round_.inner_step, record)
        elif CHAIN not in state and result is not None:
            out = self._next_memory(place)
            is_one_by_one = is_elementwise(self._outer) and result.value.numel() > 0  # of nothing there is no chunk
            if is_one_by_one and all(part.shape == result.value.shape for part in out.values()):
                after = self._step_by_chunks(round_, result, before, out)
            else:
                after = self._outer.step(round_, result, before, out=out)
        if result is not None and not round_.keeps_value:
            result = replace(result, value=torch.empty(0))
        return RoundOutcome(round_=round_, place=place, result=result, before=before, after=after)

    def _step_by_chunks(self, round_: Round, result: Result, before: Tensors, out: Tensors) -> Tensors:
        """One chunk after the other, on the hasher's threads; each is hashed while its numbers are in the cache."""
        size = self._hasher.chunk_nbytes // _NUMEL_NBYTES

        def step(start: int) -> list[bytes]:
            part = slice(start, start + size)
            pieces = {name: tensor[part] for name, tensor in out.items()}
            known = {name: tensor[part] for name, tensor in before.items()}
            self._outer.step(round_, replace(result, value=result.value[part]), known, out=pieces)
            return [digest_of(byte_view(piece)) for piece in pieces.values()]

        digests = self._hasher.each(step, range(0, result.value.numel(), size))
        for tensor, chunks in zip(out.values(), zip(*digests, strict=True), strict=True):
            self._hashed[id(tensor)] = chunks
        return out

    def install_staged(self, held: Held) -> tuple[RoundOutcome, ...]:
        """The staged state is committed as `held`: make it the live one, recycle the old one unless it is pinned.

        Returns:
            What became of each round.
        """
        staged = self._staged
        assert staged is not None, f"nothing is staged for {held}"
        assert staged.version.held == held, f"{staged.version.held} is staged, committed was {held}"
        self._staged = None
        self._spare.used(place for place, _ in self._new_in(staged.version))
        self._go_live(staged.version)
        return staged.outcomes

    def discard_staged(self) -> None:
        """The step was aborted: its buffers are free for the next attempt, or for what the others agreed on."""
        if self._staged is not None:
            self._spare.staged_in_vain(self._staged.version.manifest)
        self._staged = None

    def _new_in(self, version: Version) -> list[tuple[int, Tensors]]:
        return [(at, state) for at, state in enumerate(version.states) if state is not self.live.states[at]]

    def _go_live(self, version: Version) -> Held:
        old, self._live = self._live, version
        self._spare.forget_content()
        self._versions.append(version)
        if old is not None and not old.pins:
            self._recycle(old)
        return version.held

    def _recycle(self, version: Version) -> None:
        """Nobody needs this version any more; what no other one has is written over."""
        if version is self._live:
            return
        self._versions.remove(version)
        for place, state in enumerate(version.states):
            if not any(other.states[place] is state for other in self._versions):
                self._spare.give({place: state})

    # -------------------------------------------------------------------------------- elastic.Replica

    def pin(self) -> Version:
        """The live version, kept as it is until `release`. Costs nothing by itself."""
        self.live.pins += 1
        return self.live

    def leftover(self) -> StateManifest | None:
        """What the spare memory contains, if it was staged or replayed in vain; other fragments of it are live."""
        return self._spare.content

    def begin_restore(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """Writable buffers for a state that is being fetched, in manifest order.

        The same ones again after a broken transfer: what has arrived is not fetched twice.

        Raises:
            StateMismatch: if the donor's tensors are not those of this method and model.
        """
        begun, names = self._restoring, tuple(tensor.name for tensor in manifest.tensors)
        is_same = begun is not None and self._spare.is_empty
        states = begun.states if begun is not None and is_same else self._memory_of_a_state(begun)
        tensors = name_tensors(self.fragments, states)
        ours = {name: tensor.nbytes for name, tensor in tensors.items()}
        theirs = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
        if ours != theirs or len(names) != len(theirs):
            raise StateMismatch(f"the donor's state holds {theirs} bytes, this model and method need {ours}")
        self._spare.clear()
        self._staged = None
        if begun is None or not is_same or begun.names != names:
            destinations = tuple(byte_view(tensors[name]) for name in names)
            begun = self._restoring = _Restoring(states=states, names=names, destinations=destinations)
        return begun.destinations

    def _memory_of_a_state(self, begun: _Restoring | None) -> tuple[Tensors, ...]:
        """What is spare; for the rest what a broken transfer had, or new memory."""
        spare = self._spare.whole()
        return tuple(
            spare[place] if place in spare else self._new_state(part) if begun is None else begun.states[place]
            for place, part in enumerate(self.fragments)
        )

    async def finish_restore(self, manifest: StateManifest) -> Held:
        """The buffers are filled and verified: make them the live state."""
        assert self._restoring is not None, "no restore is under way"
        restored, self._restoring = self._restoring, None
        self._staged = None
        return self._go_live(self._version(restored.states, manifest))

    async def replay(self, entry: CommitEntry) -> Held:
        """Apply one committed outer step to what is held: the learner's own.

        Raises:
            StateDiverged: if the outcome has not the committed digest; what was held is kept.
            RemoteProtocolError: if its results do not fit this model; what was held is kept.
        """
        previous = self.live.held.digest
        await self.stage_entry(entry)
        self.install_staged(Held(entry.outer_step, entry.digest))
        if self.on_replayed is not None:
            self.on_replayed(previous, entry)
        return self.live.held

    async def stage_entry(self, entry: CommitEntry) -> None:
        """Stage what was recorded.

        Raises:
            StateDiverged, RemoteProtocolError: see `replay`; nothing is staged.
        """
        results = []
        try:
            for round_, record in itertools.zip_longest(self.next_rounds(), entry.rounds):
                results.append((await in_thread(self._read, round_, record), record))
            digest = await self.stage(results)
        except (ArithmeticError, ValueError) as error:  # weights and notes are whatever the donor says
            raise RemoteProtocolError("a recorded result cannot be applied") from error
        if digest != entry.digest:
            self.discard_staged()
            raise StateDiverged(entry.outer_step, expected=entry.digest, actual=digest)

    def _read(self, round_: Round | None, record: RoundRecord | None) -> Result | None:
        """A recorded result; where a fragment has a chain alone there are no values."""
        is_chain = round_ is not None and CHAIN in self.live.states[self.places[round_.fragment]]
        out = None if round_ is None or is_chain or round_.op is not Op.MEAN else self.mean_buffer(round_)
        numel = 0 if round_ is None else round_.numel or self.fragments[self.places[round_.fragment]].numel
        return read_record(round_, record, numel=0 if is_chain else numel, out=out)


def _first_value(fragment: Fragment, parameters: Tensor) -> Tensor:
    """What a fragment's state is made from; what is no parameter begins with zeros."""
    if fragment.kind != PARAM:
        return torch.zeros(fragment.numel)
    return fragment.gather(parameters, out=torch.empty(fragment.numel))

# SPDX-License-Identifier: Apache-2.0
"""This peer's copy of the shared state: live, staged for a commit, pinned for learners.

A version of the state is never changed once it is live. An outer step moves one fragment: it writes that fragment's
next state into spare memory (`stage`) and shares all others with the version before. A commit makes the staged version
the live one (`install_staged`), an abort forgets it (`discard_staged`). A donor pins the version it serves: what is in
a pinned version is not recycled, and only then does the next stage allocate.

Memory, in copies of the parameters for DiLoCo: live 2, spare 2 (the mean is received straight into one of them, and a
state that is being fetched into both), 2 more for every older version that is still pinned. With several fragments
spare memory is that of one fragment of each size, and a pinned version keeps only what is no longer live; a state that
is being fetched takes 2 for as long as that lasts. Spare memory that was staged in vain keeps its digests: what is
right in it need not be fetched.

It must not know the network, views or workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus.collective import decode_result
from isthmus.collective.core.types import OuterStep
from isthmus.collective.errors import RemoteProtocolError
from isthmus.elastic.core.messages import Held
from isthmus.elastic.digest import Hasher, StateManifest, TensorManifest, describe_state
from isthmus.elastic.errors import StateDiverged, StateMismatch
from isthmus.elastic.parity import Difference
from isthmus.elastic.replica import CommitEntry
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import ANCHOR, Absorbed, Outer, Result, Round, State
from isthmus.trainer.round_schedule import RoundSchedule
from isthmus.trainer.state_version import Version, byte_view, name_tensors
from isthmus.trainer.threads import in_thread

_NUMEL_NBYTES = 4
"""Of an fp32 element."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Staged:
    version: Version
    index: int
    absorbed: Absorbed = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Restoring:
    """Memory of a whole state that is being filled, and how it was handed out."""

    states: tuple[State, ...]
    names: tuple[str, ...]
    destinations: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leftover:
    """A version that was staged in vain. Of its memory one fragment is spare, the others are live."""

    index: int
    manifest: StateManifest


class OuterState:
    """The shared state of all fragments, and the replica that elastic sees.

    Args:
        outer: the method.
        fragments: what is exchanged, by index: each parameter is in exactly one of them.
        schedule: which round makes which outer step.
        hasher: makes the manifests; its threads are the caller's to close.
    """

    def __init__(self, outer: Outer, fragments: Sequence[Fragment], schedule: RoundSchedule, hasher: Hasher) -> None:
        assert [fragment.index for fragment in fragments] == list(range(len(fragments))), "they are kept by index"
        self._outer = outer
        self._fragments = tuple(fragments)
        self._schedule = schedule
        self._hasher = hasher
        self._live: Version | None = None
        self._versions: list[Version] = []  # the live one, and those that are pinned
        self._staged: _Staged | None = None
        self._spares: dict[int, State] = {}  # by elements of the fragment, at most one of each size
        self._leftover: _Leftover | None = None
        self._restoring: _Restoring | None = None
        self.on_replayed: Callable[[bytes, CommitEntry], None] | None = None
        """Told of every commit that was replayed, and of the digest of the state that it was applied to."""

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

    def parameters_in(self, where: Difference) -> tuple[str, ...]:
        """The model's parameters that a range of a shared tensor belongs to; none if it is not laid out as they are."""
        tensor = self.live.tensors[where.tensor]
        for fragment, state in zip(self._fragments, self.live.states, strict=True):
            if tensor.numel() == fragment.numel and any(tensor is own for own in state.shared.values()):
                start, stop = where.start_nbytes // _NUMEL_NBYTES, -(-where.stop_nbytes // _NUMEL_NBYTES)
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
        states = tuple(self._new_state(fragment) for fragment in self._fragments)
        own = name_tensors(states)
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
        values = (
            parameters if len(self._fragments) == 1 else fragment.gather(parameters, out=torch.empty(fragment.numel))
            for fragment in self._fragments
        )
        states = tuple(map(self._outer.init, self._fragments, values))
        return self._go_live(self._version(states, await self._describe(0, name_tensors(states))))

    def _new_state(self, fragment: Fragment) -> State:
        """Memory of a fragment's state, with any content. Its pages are made where they are written.

        To touch gigabytes here would take seconds, in which no heartbeat goes out and no byte comes in.
        """
        outline = self._outer.init(fragment, torch.empty(fragment.numel, device="meta"))
        if outline.private:  # these do not travel: they begin as the method says
            return self._outer.init(fragment, torch.zeros(fragment.numel))
        return State(shared={name: torch.empty_like(part, device="cpu") for name, part in outline.shared.items()})

    def _version(self, states: tuple[State, ...], manifest: StateManifest) -> Version:
        return Version(states=states, manifest=manifest, when_idle=self._recycle)

    async def _describe(
        self, outer_step: int, tensors: Mapping[str, Tensor], before: Version | None = None
    ) -> StateManifest:
        """Hash what is not the very memory of a version that was hashed before."""
        parts: dict[str, TensorManifest] = {}
        if before is not None and before.manifest.chunk_nbytes == self._hasher.chunk_nbytes:
            same = (name for name, tensor in tensors.items() if before.tensors[name] is tensor)
            known = before.parts()
            parts = {name: known[name] for name in same}
        others = [(name, byte_view(tensor)) for name, tensor in tensors.items() if name not in parts]
        parts |= {part.name: part for part in await self._hasher.describe_async(others)}
        return describe_state(
            OuterStep(outer_step), [parts[name] for name in tensors], chunk_nbytes=self._hasher.chunk_nbytes
        )

    # -------------------------------------------------------------------------------- one outer step

    def result_buffer(self) -> Tensor:
        """[fragment.numel], where the mean of the next round goes: spare memory of its fragment, see `stage`."""
        self._leftover = None
        index = self._next_index()
        size = self._fragments[index].numel
        if size not in self._spares:
            # What a broken transfer has brought is worth less than a third copy of the state costs.
            begun, self._restoring = self._restoring, None
            self._spares[size] = self.live.states[index].empty_like() if begun is None else begun.states[index]
        return self._spares[size].shared[ANCHOR]

    def _next_index(self) -> int:
        return self._schedule.round_after(self.live.manifest.outer_step).fragment.index

    async def stage(self, round_: Round, weights: Mapping[str, float]) -> bytes:
        """Absorb the mean in `result_buffer` into staging. The live state is untouched.

        Args:
            round_: which made it.
            weights: of its members, in their order.

        Returns:
            The digest that the shared state would have.
        """
        mean, live, index = self.result_buffer(), self.live, round_.fragment.index
        before = live.states[index]
        given = {member: weight for member, weight in weights.items() if weight > 0.0}
        if given:
            result = Result(
                value=mean, members=tuple(given), weight_sum=math.fsum(given.values()), weights=tuple(given.values())
            )
            spare = self._spares[self._fragments[index].numel]
            absorbed = await in_thread(self._outer.absorb, round_, result, before, out=spare)
        else:
            # A round of learners that have not trained yet: nothing moves, the step counts.
            absorbed = Absorbed.unchanged(before)
        states = (*live.states[:index], absorbed.state, *live.states[index + 1 :])
        manifest = await self._describe(live.manifest.outer_step + 1, name_tensors(states), live)
        self._staged = _Staged(version=self._version(states, manifest), index=index, absorbed=absorbed)
        return manifest.digest

    def install_staged(self, held: Held) -> Absorbed:
        """The staged state is committed as `held`: make it the live one, recycle the old one unless it is pinned.

        Returns:
            What the workers do with their local values of the round's fragment.
        """
        staged = self._staged
        assert staged is not None, f"nothing is staged for {held}"
        assert staged.version.held == held, f"{staged.version.held} is staged, committed was {held}"
        self._staged = None
        size = self._fragments[staged.index].numel
        if self._spares.get(size) is staged.absorbed.state:
            del self._spares[size]
        self._go_live(staged.version)
        return staged.absorbed

    def discard_staged(self) -> None:
        """The round was aborted: its buffers are free for the next attempt, or for what the others agreed on."""
        if self._staged is not None:
            self._leftover = _Leftover(index=self._staged.index, manifest=self._staged.version.manifest)
        self._staged = None

    def _go_live(self, version: Version) -> Held:
        old, self._live = self._live, version
        self._leftover = None
        self._versions.append(version)
        if old is not None and not old.pins:
            self._recycle(old)
        return version.held

    def _recycle(self, version: Version) -> None:
        """Nobody needs this version any more; what no other one has is written over."""
        if version is self._live:
            return
        self._versions.remove(version)
        for index, (fragment, state) in enumerate(zip(self._fragments, version.states, strict=True)):
            is_shared = any(other.states[index] is state for other in self._versions)
            if not is_shared and fragment.numel not in self._spares:
                self._spares[fragment.numel] = state

    # -------------------------------------------------------------------------------- elastic.Replica

    def pin(self) -> Version:
        """The live version, kept as it is until `release`. Costs nothing by itself."""
        self.live.pins += 1
        return self.live

    def leftover(self) -> StateManifest | None:
        """What the spare memory contains, if it was staged or replayed in vain; other fragments of it are live."""
        return None if self._leftover is None else self._leftover.manifest

    def begin_restore(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """Writable buffers for a state that is being fetched, in manifest order.

        The same ones again after a broken transfer: what has arrived is not fetched twice.

        Raises:
            StateMismatch: if the donor's tensors are not those of this method and model.
        """
        begun, names = self._restoring, tuple(tensor.name for tensor in manifest.tensors)
        if begun is not None and not self._spares:
            states = begun.states
        else:
            states, begun = self._memory_of_a_state(begun), None
        tensors = name_tensors(states)
        ours = {name: tensor.nbytes for name, tensor in tensors.items()}
        theirs = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
        if ours != theirs or len(names) != len(theirs):
            raise StateMismatch(f"the donor's state holds {theirs} bytes, this model and method need {ours}")
        self._spares.clear()
        self._staged = self._leftover = None
        if begun is None or begun.names != names:
            destinations = tuple(byte_view(tensors[name]) for name in names)
            begun = self._restoring = _Restoring(states=states, names=names, destinations=destinations)
        return begun.destinations

    def _memory_of_a_state(self, begun: _Restoring | None) -> tuple[State, ...]:
        """What is spare; for the rest what a broken transfer had, or new memory."""
        spares = dict(self._spares)
        states: dict[int, State] = {}
        # What was staged in vain is of use only in its own place.
        first = -1 if self._leftover is None else self._leftover.index
        for fragment in sorted(self._fragments, key=lambda fragment: fragment.index != first):
            if fragment.numel in spares:
                states[fragment.index] = spares.pop(fragment.numel)
            else:
                states[fragment.index] = self._new_state(fragment) if begun is None else begun.states[fragment.index]
        return tuple(states[index] for index in range(len(states)))

    async def finish_restore(self, manifest: StateManifest) -> Held:
        """The buffers are filled and verified: make them the live state."""
        assert self._restoring is not None, "no restore is under way"
        restored, self._restoring = self._restoring, None
        self._staged = None
        return self._go_live(self._version(restored.states, manifest))

    async def replay(self, entry: CommitEntry) -> Held:
        """Apply one committed result to what is held: the learner's own outer step.

        Raises:
            StateDiverged: if the outcome has not the committed digest; what was held is kept.
            RemoteProtocolError: if its chunks do not fit this model; what was held is kept.
        """
        previous = self.live.held.digest
        await self.stage_result(entry)
        self.install_staged(Held(entry.outer_step, entry.digest))
        if self.on_replayed is not None:
            self.on_replayed(previous, entry)
        return self.live.held

    async def stage_result(self, entry: CommitEntry) -> None:
        """Absorb a recorded result into staging.

        Raises:
            StateDiverged, RemoteProtocolError: see `replay`; nothing is staged.
        """
        round_ = self._schedule.round_after(self.live.manifest.outer_step)
        if entry.fragment != round_.fragment.index:
            raise RemoteProtocolError(f"a recorded result is of fragment {entry.fragment}, not {round_.fragment.index}")
        await in_thread(_decode_all, entry, self.result_buffer())
        digest = await self.stage(round_, dict(entry.weights))
        if digest != entry.digest:
            self.discard_staged()
            raise StateDiverged(entry.outer_step, expected=entry.digest, actual=digest)


def _decode_all(entry: CommitEntry, out: Tensor) -> None:
    try:
        ends = [chunk.start_numel for chunk in entry.chunks[1:]] + [out.numel()]
        for chunk, end in zip(entry.chunks, ends, strict=False):
            decode_result(entry.codec, chunk.start_numel, end - chunk.start_numel, chunk.data, out)
    except ValueError as error:  # the donor's fault, not ours
        raise RemoteProtocolError("a recorded result does not fit") from error

# SPDX-License-Identifier: Apache-2.0
"""What a peer makes of its membership: outer steps in their order, every sample's work once, and what it remembers.

`order`: steps are emitted, handed in and landed one after the other, none twice, each when its time has come.
`I6`: of every fragment a payload holds exactly the work that no other one holds; what a vote consumes is what was
trained on, and is in no commit nor in an earlier payload of a fragment that was out. `private`: what a peer remembers
follows from the steps that counted its part.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.collective.core.types import PeerRef, RoundKey
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord
from tests.simulation.methods import Met, after_private, begun_private
from tests.simulation.symbols import Payload, name
from tests.simulation.world import demand

if TYPE_CHECKING:
    from tests.simulation.peer import PeerNode
    from tests.simulation.simulator import Simulator


def indices(ranges: Iterable[IndexRange]) -> set[int]:
    """Sample by sample."""
    return {index for item in ranges for index in range(item.start, item.stop)}


@dataclass(slots=True)
class Book:
    """Of one membership of a peer."""

    first: int
    """The outer step that it began from."""
    landed: int
    emitted: int
    private: bytes
    handed_in: int = 0
    out: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    """Emitted, not landed: by fragment, the samples that it holds."""
    counted: dict[int, tuple[CommitRecord, str]] = field(default_factory=dict)
    """By outer step: the commit that holds a payload of it, and which."""
    trained: set[int] = field(default_factory=set)
    behind: dict[int, set[int]] = field(default_factory=dict)
    """By outer step: what it had trained on when it emitted that, and was in no commit nor in a payload before it."""
    given: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By fragment: what is in a payload that counted, or may yet."""
    consumed: set[int] = field(default_factory=set)
    weighed: set[int] = field(default_factory=set)
    """Outer steps that it has handed in with a weight: of the others nothing is added up."""
    is_void: bool = False
    """The run went back, and it has not heard yet."""

    def has_missed(self, live: int) -> bool:
        """Whether the others have made a step without it that has not landed."""
        return live > self.emitted or any(step <= live and step not in self.counted for step in self.out)


class Courses:
    """One book for each peer that is a member."""

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self._last = sim.options.outer_steps
        self._books: dict[PeerRef, Book] = {}
        self._works: dict[RoundKey, list[tuple[int, set[int]]]] = {}  # by commit: fragment and samples
        self._counted: defaultdict[int, set[int]] = defaultdict(set)  # by fragment
        self._met: dict[tuple[str, int], str] = {}  # by payload and fragment: whom it met

    # ------------------------------------------------------------------------ the run

    def committed(self, record: CommitRecord, payloads: Mapping[PeerRef, Payload]) -> None:
        """These payloads are in it."""
        counted = [item for item in payloads.values() if item.weight > 0.0]
        works = [(fragment, indices(ranges)) for item in counted for fragment, ranges in item.works]
        self._works[record.key] = works
        self._count(works)
        for ref, payload in payloads.items():
            book = self._books.get(ref)
            if book is not None:
                book.counted[record.outer_step] = record, payload.name
                book.consumed |= indices(payload.consumed)

    def _count(self, works: Iterable[tuple[int, set[int]]]) -> None:
        for fragment, samples in works:
            twice = self._counted[fragment] & samples
            demand(not twice, "I6", "fragment {} counts the work on samples {} twice", fragment, twice)
            self._counted[fragment] |= samples

    def rebuilt(self, kept: Iterable[CommitRecord]) -> None:
        """Whatever else was committed is given up; nobody's part counts until it begins again."""
        self._counted.clear()
        for commit in kept:
            self._count(self._works.get(commit.key, ()))
        for book in self._books.values():
            book.is_void = True

    # ------------------------------------------------------------------------ one peer

    def began(self, node: "PeerNode", landed: int, step: int) -> None:
        """It is a member, and starts from this outer step. What is not due by then has landed with nobody."""
        plan, expected = self._sim.plan, step
        while expected > 0 and plan.due_step(expected) > plan.inner_step(step):
            expected -= 1
        demand(landed == expected, "order", "{} begins with step {} landed, not {}", node.ref, landed, expected)
        digest = node.state.held.digest if node.state is not None else b""
        self._books[node.ref] = Book(step, landed, step, begun_private(digest), handed_in=step)

    def gone(self, ref: PeerRef) -> None:
        """It is no member any more."""
        self._books.pop(ref, None)

    def trained(self, node: "PeerNode", inner_step: int, taken: Iterable[IndexRange]) -> None:
        """It has made this inner step."""
        book, plan = self._books[node.ref], self._sim.plan
        demand(book.emitted < self._last, "order", "{} trains when the last step is emitted", node.ref)
        until = min((plan.due_step(step) for step in self._on_the_way(book)), default=inner_step)
        demand(inner_step <= until, "order", "{} trains past inner step {}, where a step is due", node.ref, until)
        emits_at = plan.inner_step(book.emitted + 1)
        demand(inner_step <= emits_at, "order", "{} trains past inner step {}, where it emits", node.ref, emits_at)
        book.trained |= indices(taken)

    def emitted(self, node: "PeerNode", payload: Payload, inner_step: int) -> None:
        """It has made a payload."""
        book, step = self._books[node.ref], payload.outer_step + 1
        live = node.state.held.outer_step if node.state is not None else 0
        demand(step == book.emitted + 1, "order", "{} emits step {} after {}", node.ref, step, book.emitted)
        is_now = inner_step == self._sim.plan.inner_step(step)
        demand(is_now or step <= live, "order", "{} emits step {} after inner step {}", node.ref, step, inner_step)
        may_emit = not book.has_missed(live) or self._is_given_again(book)
        demand(may_emit, "order", "{} emits step {} before it has landed what it missed", node.ref, step)
        due = min((self._sim.plan.due_step(item) for item in self._on_the_way(book)), default=inner_step)
        demand(inner_step <= due, "order", "{} emits step {}, and was to land one before", node.ref, step)
        base = max(book.landed, book.first)
        # Of several steps that the others made at once only the newest state comes.
        skipped = range(payload.base.outer_step + 1, base + 1) if book.has_missed(live) else ()
        is_base = payload.base.outer_step == base or (bool(skipped) and book.counted.keys().isdisjoint(skipped))
        demand(is_base, "order", "{} emits from step {}, not {}", node.ref, payload.base.outer_step, base)
        fragments = {fragment for fragment, _ in payload.works}
        before = [book.behind[other] for other, works in book.out.items() if not fragments.isdisjoint(works)]
        book.emitted, book.behind[step] = step, book.trained.difference(book.consumed, *before)
        book.out[step] = {fragment: indices(ranges) for fragment, ranges in payload.works}
        for fragment, ranges in payload.works:
            samples, expected = indices(ranges), book.trained - book.given[fragment]
            demand(samples <= expected, "I6", "{} gives to fragment {} what it has given before", node.ref, fragment)
            demand(samples == expected, "I6", "{} does not give to fragment {} all it owes", node.ref, fragment)
            book.given[fragment] |= samples

    def handed_in(self, node: "PeerNode", payload: Payload) -> None:
        """It is on its way to a commit."""
        book, step = self._books[node.ref], payload.outer_step + 1
        live = node.state.held.outer_step if node.state is not None else 0
        demand(step in book.out, "order", "{} hands in step {}, which is not out", node.ref, step)
        demand(step > book.handed_in, "order", "{} hands in step {} after {}", node.ref, step, book.handed_in)
        demand(live == step - 1, "order", "{} hands in step {}, and holds {}", node.ref, step, live)
        works = {fragment: indices(ranges) for fragment, ranges in payload.works}
        demand(works == book.out[step], "I6", "{} hands in other work than it owes to step {}", node.ref, step)
        book.handed_in = step
        if payload.weight > 0.0:
            book.weighed.add(step)
        expected = book.behind[step] - book.consumed
        is_all = indices(payload.consumed) == expected or book.is_void
        demand(is_all, "I6", "{} does not consume what is behind step {}", node.ref, step)

    def landed(self, node: "PeerNode", step: int, met: Met | None, *, counted: bool) -> None:
        """It trains from this step on, which has counted its part, or has not; `met` is None if it gave nothing."""
        book, plan, worker = self._books[node.ref], self._sim.plan, node.worker
        live = node.state.held.outer_step if node.state is not None else 0
        demand(step == book.landed + 1, "order", "{} lands step {} after {}", node.ref, step, book.landed)
        demand(step <= live, "order", "{} lands step {}, and holds {}", node.ref, step, live)
        demand(
            (met is not None) == (step in book.out), "order", "{} lands step {} with another's payload", node.ref, step
        )
        is_early = step not in book.out and step > book.first
        demand(not (is_early and book.out), "order", "{} follows the others past what is out", node.ref)
        comes_later = self._is_given_again(book)
        demand(not comes_later, "order", "{} lands step {} before its fragments are given again", node.ref, step)
        if not book.is_void and step > book.first:
            does_count = step in book.counted
            demand(
                counted == does_count, "order", "{} lands step {} as one that counted it: {}", node.ref, step, counted
            )
        if not book.has_missed(live) and worker.course is not None:
            now, following = worker.course.inner_step, book.emitted + 1
            is_last = following > self._last
            is_due = is_last or any(plan.due_step(item) <= now for item in self._on_the_way(book))
            demand(is_due, "order", "{} lands step {} before it is due", node.ref, step)
            emits = not is_last and plan.inner_step(following) <= now
            demand(not emits, "order", "{} lands step {} before it emits {}", node.ref, step, following)
        works = book.out.pop(step, {})
        book.landed, book.emitted = step, max(step, book.emitted)
        for fragment, samples in works.items() if not (counted and step in book.weighed) else ():
            book.given[fragment] -= samples
        if met is not None and not book.is_void:
            self._remembers(node, book, step, met)

    def _is_given_again(self, book: Book) -> bool:
        """Whether the next step to land has a fragment that is emitted anew before it is due, and was not yet."""
        step = book.landed + 1
        newest = self._sim.plan.again(step)
        return newest > step and (step > book.emitted or min(newest, self._last) > book.emitted)

    def _on_the_way(self, book: Book) -> Iterable[int]:
        return range(book.landed + 1, book.emitted + 1)

    def _remembers(self, node: "PeerNode", book: Book, step: int, met: Met) -> None:
        """What it remembers is made of the steps that counted its part, and of nothing else."""
        if step in book.counted:
            record, payload = book.counted[step]
            for fragment, other in met:
                own = self._met.setdefault((other, fragment), payload)
                theirs = self._met.setdefault((payload, fragment), other)
                is_pair = (own, theirs) == (payload, other)
                demand(is_pair, "private", "{} and {} met, and {} and {}", payload, other, own, theirs)
            book.private = after_private(book.private, record.digest, met)
        demand(node.worker.private == book.private, "private", "{} remembers something else", name(node.ref))

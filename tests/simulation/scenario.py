# SPDX-License-Identifier: Apache-2.0
"""Histories in files: a seed with its options, or a script on a calm stage, and what has to come of it.

A file of `scenarios/` is a TOML table:

    title     one sentence: what happens, and what has to hold
    why       what the history has shown (optional)
    seed      of the world; the default is 1
    mutant    the broken variant that has to be caught (optional; mutants.py)
    options   whatever differs from a calm world (options.py); without it and without a script: the seed's first draw
    script    what is done, step by step (see `STEPS`); without it the seed's faults strike and everything is healed
    expect    the invariant that is violated, the end, and the story: views with their causes, and commits

The story is made from the journal, so that it says what the run decided and nothing of how. What happens now is written
down by `scripts/simulate --scenario FILE --rewrite`.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from isthmus.elastic.core.events import (
    Answered,
    CoordinatorEffect,
    Disconnect,
    Expose,
    LeaveRequested,
    Persist,
    Resign,
    SendToPeer,
)
from isthmus.elastic.core.records import CommitRecord, Genesis, Record, ViewRecord
from tests.simulation.mutants import MUTANTS
from tests.simulation.network import COORDINATOR
from tests.simulation.options import Options
from tests.simulation.parts import Parts
from tests.simulation.peer import PeerNode
from tests.simulation.process import Process
from tests.simulation.simulator import Outcome, Simulator
from tests.simulation.stage import Stage

FOLDER = Path(__file__).parent / "scenarios"


@dataclass(slots=True)
class Expected:
    """What has to come of a scenario."""

    violation: str = ""
    end: str = ""
    story: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Scenario:
    """See the module's docstring."""

    title: str
    why: str = ""
    seed: int = 1
    mutant: str = ""
    options: dict[str, Any] | None = None
    script: list[str] = field(default_factory=list)
    expect: Expected = field(default_factory=Expected)

    @classmethod
    def load(cls, path: Path) -> "Scenario":
        """Read a file. Raises TypeError for what it does not know."""
        table = tomllib.loads(path.read_text())
        return cls(**{**table, "expect": Expected(**table.get("expect", {}))})

    def save(self, path: Path) -> None:
        """Write a file."""
        lines = [f"title = {_toml(self.title)}"]
        lines += [f"why = {_toml(self.why)}"] if self.why else []
        lines += [f"seed = {self.seed}"]
        lines += [f"mutant = {_toml(self.mutant)}"] if self.mutant else []
        lines += [f"script = {_toml(self.script)}"] if self.script else []
        if self.options is not None:
            lines += ["", "[options]", *(f"{name} = {_toml(value)}" for name, value in self.options.items())]
        lines += ["", "[expect]"]
        lines += [f"{name} = {_toml(value)}" for name, value in asdict(self.expect).items() if value]
        path.write_text("\n".join(lines) + "\n")

    def run(self, echo: Callable[[str], None] | None = None) -> tuple[Outcome, Expected]:
        """Let it happen: what came of it, and what `expect` would have to say of that."""
        parts = MUTANTS[self.mutant].parts if self.mutant else Parts()
        if self.script:
            stage = Stage(seed=self.seed, parts=parts, echo=echo, **_read({"num_peers": 3, **(self.options or {})}))
            sim = stage.sim
            outcome = sim.run(lambda: play(stage, self.script))
        else:
            options = Options(**_read(self.options)) if self.options is not None else Options.first_of_seed(self.seed)
            sim = Simulator(self.seed, options=options, parts=parts, echo=echo)
            outcome = sim.run()
        violated = outcome.violation.invariant if outcome.violation is not None else ""
        return outcome, Expected(violated, outcome.end, story_of(sim.coordinator.journal))


def changed(options: Options) -> dict[str, Any]:
    """Those that are not as in `Options()`."""
    defaults = {item.name: item.default for item in fields(Options) if item.default is not MISSING}
    return {name: value for name, value in asdict(options).items() if value != defaults[name]}


def story_of(journal: Sequence[Record]) -> list[str]:
    """What a run decided, in a few lines."""
    lines: list[str] = []
    first = last = 0
    for record in [*journal, None]:
        if isinstance(record, CommitRecord):
            first, last = first or record.outer_step, record.outer_step
            continue
        if isinstance(record, ViewRecord | Genesis | None) and first:
            lines.append(f"commits {first} to {last}" if last > first else f"commit {last}")
            first = 0
        match record:
            case Genesis():
                lines.append(f"begins at outer step {record.outer_step}")
            case ViewRecord(view=view):
                members = " ".join(f"{int(member.peer_id, 16)}.{member.incarnation}" for member in view.members)
                lines.append(f"view {view.epoch} of {members or 'nobody'}: {_short(record.cause)}")
            case _:
                pass
    return lines


# ------------------------------------------------------------------------ scripts


def play(stage: Stage, script: Sequence[str]) -> str:
    """Do what a script says. The end that its last step has led to, if that is `heal`."""
    end = ""
    for step in script:
        verb, *words = step.split()
        if verb not in STEPS:
            raise ValueError(f"{step!r}: no such step")
        end = STEPS[verb](stage, words) or ""
    return end


def _start(stage: Stage, words: list[str]) -> None:
    stage.start(*(int(word) - 1 for word in words))


def _run(stage: Stage, words: list[str]) -> None:
    stage.run(float(words[0]))


def _until(stage: Stage, words: list[str]) -> None:
    within_s = 20.0
    if "within" in words:
        place = words.index("within")
        within_s, words = float(words[place + 1]), words[:place]
    what, *rest = words
    match what:
        case "active":
            stage.until_active(*(int(word) - 1 for word in rest), within_s=within_s)
        case "committed":
            stage.until_committed(int(rest[0]), within_s=within_s)
        case "members":
            stage.until(lambda: bool(stage.views) and stage.members() == rest, within_s)
        case "gone":
            node = _peer(stage, rest[0])
            stage.until(lambda: node.exit is not None, within_s)
            assert node.exit is not None
            assert rest[1:] in ([], [str(node.exit.code)]), f"{node.exit}"
        case "staged":
            stage.until(lambda: all(_peer(stage, word).staged is not None for word in rest), within_s)
        case "holds":
            stage.until(lambda: _peer(stage, rest[0]).state is not None, within_s)
        case "cause":
            stage.until(lambda: bool(stage.views) and " ".join(rest) in stage.views[-1].cause, within_s)
        case "down":
            stage.until(lambda: not stage.sim.coordinator.alive, within_s)
        case _:
            raise ValueError(f"until {what!r}: no such condition")


def _crash(stage: Stage, words: list[str]) -> None:
    if words[0] == COORDINATOR:
        stage.sim.coordinator.crash()
    else:
        _peer(stage, words[0]).crash(silently="silently" in words)


def _dies_after(stage: Stage, words: list[str]) -> None:
    kind, number = words[0], int(words[1]) if len(words) > 1 else 1

    def is_it(effect: CoordinatorEffect) -> bool:
        nonlocal number
        match effect:
            case Persist(record=content) | SendToPeer(message=content):
                number -= type(content).__name__ == kind
            case Resign() | Disconnect() | Answered() | Expose():
                pass
        return number == 0

    stage.sim.coordinator.dies_after = is_it


def _pause(stage: Stage, words: list[str]) -> None:
    _process(stage, words[0]).pause(float(words[1]))


def _jump(stage: Stage, words: list[str]) -> None:
    _process(stage, words[0]).jump(float(words[1]))


def _hang(stage: Stage, words: list[str]) -> None:
    _peer(stage, words[0]).hang(True)


def _unhang(stage: Stage, words: list[str]) -> None:
    _peer(stage, words[0]).hang(False)


def _flaw(stage: Stage, words: list[str]) -> None:
    _peer(stage, words[0]).flawed_step = stage.commits[-1].outer_step + int(words[1])


def _leave(stage: Stage, words: list[str]) -> None:
    _peer(stage, words[0]).feed(LeaveRequested(now="now" in words))


def _unreachable(stage: Stage, words: list[str]) -> None:
    node = _peer(stage, words[0])
    node.next_undialled_by = frozenset(stage.sim.peers) - {node.peer_id}


def _mute(stage: Stage, words: list[str]) -> None:
    _peer(stage, words[0]).hang_absorb(True)


def _cut(stage: Stage, words: list[str]) -> None:
    stage.sim.network.cut(_site(stage, words[0]), _site(stage, words[1]))


def _mend(stage: Stage, words: list[str]) -> None:
    stage.sim.network.mend(_site(stage, words[0]), _site(stage, words[1]))


def _partition(stage: Stage, words: list[str]) -> None:
    place = words.index("from")
    ones, others = ([_site(stage, word) for word in part] for part in (words[:place], words[place + 1 :]))
    for one in ones:
        for other in others:
            stage.sim.network.cut(one, other)
            stage.sim.network.cut(other, one)


def _reunite(stage: Stage, words: list[str]) -> None:
    stage.sim.network.mend_all()


def _heal(stage: Stage, words: list[str]) -> str:
    return stage.sim.heal_and_converge()


STEPS: dict[str, Callable[[Stage, list[str]], str | None]] = {
    "start": _start,  # start [PEER ...]: all if none is named
    "run": _run,  # run SECONDS
    "until": _until,  # until active PEER ... | committed NUMBER | members PEER ... | gone PEER | ... [within SECONDS]
    "crash": _crash,  # crash PEER [silently] | crash coordinator
    "dies-after": _dies_after,  # dies-after RECORD-OR-MESSAGE [NUMBER]: the coordinator, right after that
    "pause": _pause,  # pause SITE SECONDS
    "jump": _jump,  # jump SITE SECONDS: its clock
    "hang": _hang,  # hang PEER
    "unhang": _unhang,  # unhang PEER
    "flaw": _flaw,  # flaw PEER NUMBER: other bits than the rest, that many commits from now
    "unreachable": _unreachable,  # unreachable PEER: nobody can dial its next start
    "mute": _mute,  # mute PEER: its outer step hangs, it never votes again
    "leave": _leave,  # leave PEER [now]
    "cut": _cut,  # cut FROM TO
    "mend": _mend,  # mend FROM TO
    "partition": _partition,  # partition SITE ... from SITE ...
    "reunite": _reunite,  # reunite: nothing is cut any more
    "heal": _heal,  # heal: whatever strikes ends, and the run has to go on
}


def _peer(stage: Stage, word: str) -> PeerNode:
    return stage.peers[int(word) - 1]


def _site(stage: Stage, word: str) -> str:
    return COORDINATOR if word == COORDINATOR else stage.peers[int(word) - 1].peer_id


def _process(stage: Stage, word: str) -> Process:
    return stage.sim.coordinator if word == COORDINATOR else stage.peers[int(word) - 1]


# ------------------------------------------------------------------------ words


def _read(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _short(cause: str) -> str:
    return cause.replace("0" * 15, "").strip()


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case list() if value and isinstance(value[0], str):
            return "[\n" + "".join(f"  {_toml(item)},\n" for item in value) + "]"
        case list() | tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            raise TypeError(f"no TOML for {value!r}")

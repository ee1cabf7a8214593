# SPDX-License-Identifier: Apache-2.0
"""A first hour with isthmus on a terminal of 80 columns: every line that it prints, and every exit code.

What differs from one hour to the next (ids, numbers, times, addresses) is a word in capitals here. Of a log the set of
lines is compared, since their order and number depend on the machine; results are compared line by line.
"""

import json
import re
from pathlib import Path

import pytest

from tests.multiprocess.processes import TIMEOUT_S, Process
from tests.multiprocess.run_harness import Run, running
from tests.unit.trainer.screen import COLUMNS, Screen

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

AT_HOME = ("--listen", "127.0.0.1:0")
SMALL = """
[run]
name = "hour"
outer_steps = 20_000
[model]
dim = 16
num_layers = 1
num_heads = 2
hidden_dim = 32
seq_len = 32
[data]
limit = "400kB"
[inner]
batch_size = 2
[outer]
inner_steps = 20
[members] # a busy machine makes nobody late, silent or stalled
grace = "1h"
heartbeat_timeout = "60s"
stall_timeout = "10min"
[checkpoint]
every = 0 # but at the end
[eval]
every = 0
[node]
threads = 1
"""

_WORDS = (
    (r"isthmus2[a-z2-7]+", "TICKET"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "DATE"),
    (r"^\d\d:\d\d:\d\d ", "TIME "),
    (r"hour-[0-9a-f]{8}", "RUN"),
    (r"\b[0-9a-f]{16}\b", "PEER"),
    (r"127\.0\.0\.1:0", "HOME"),
    (r"127\.0\.0\.1:\d+", "ADDRESS"),
    (r"Python 3\.\d+\.\d+'s standard library", "LIBRARY"),
    (r"\b\d+:\d\d(:\d\d)?\b", "DURATION"),
    (r"\b[\d.]+ (B|kB|MB|GB|TB)\b", "SIZE"),
    # Who dials depends on the ids, and the first round trip may not be measured yet.
    (r"(to|from) 127\.0\.0\.1(, [\d.]+ ms)?", "PATH"),
    (r": (training|exchanging)$", ": PHASE"),
    (r"(?<![A-Za-z.])\d+(,\d{3})*(\.\d+)?", "N"),
    (r"\b(N (other )?[a-z]*[a-rt-z])s\b", r"\1"),
    (r" {2,}(?=\S)", "  "),
    (r"(?<=\S) +", " "),
)
_LIVE = re.compile(r"step \d+/20000, round \d+/20, loss \d\.\d{3}, \S+ tok/s, 2 peers, \d+:\d\d(:\d\d)? left")

DOCTOR = ["python", "device", "memory", "disk", "files", "bbr", "listen", "addresses"]
INVITATION = ["others join with (until DATE):", "", "  isthmus join TICKET", ""]
LISTENING = "TIME INFO isthmus.trainer.run.daemon listening on='ADDRESS' address=ADDRESS run_id=RUN tls=auto page=http://ADDRESS/"
PAGE_AT = "page at http://ADDRESS/, metrics at http://ADDRESS/metrics"
TEXT = "TIME INFO isthmus.trainer.record.chronicle text: SIZE, LIBRARY, from this machine"
NEEDS = (
    "TIME INFO isthmus.trainer.run.room this_run_needs memory='SIZE' memory_free='SIZE' disk='SIZE' disk_free='SIZE'"
)
READY = "TIME INFO isthmus.trainer.workers.pool workers_ready num_workers=N device=cpu (N thread)"
MOMENTS = "TIME INFO isthmus.trainer.engine.moments moments_remembered outer_step=N own_steps=N"
PUT_ASIDE = "TIME INFO isthmus.trainer.checkpoint.lineages put_aside place=lineage-N moved=N"
VIEW = "TIME INFO isthmus.collective.api.communicator view_installed epoch=N world_size=N"
COMMITTED = "TIME INFO isthmus.trainer.record.chronicle committed outer_step=N epoch=N world_size=N loss=N wait_s=N"
ADMITTED = "TIME INFO isthmus.trainer.contact.admission admitted peer_id=PEER by=PEER"
ADOPTED = (
    "TIME INFO isthmus.trainer.checkpoint.durability checkpoint_adopted outer_step=N path=runs/hour/checkpoints/step-N"
)
LAST_LEFT = "left at outer step N, which nobody else holds: start this peer again to go on from there"

AUDIT = [
    "run RUN",
    "journal runs/hour/journal.sqlite, N record",
    "outer steps N to N, complete",
    "views N, the last is epoch N, N to N member a commit",
    "peers N in N start, N token",
    "  PEER N token N% N commit N sample",
    "departures N member",
    "other votes none",
    "samples N used up by commits, each once",
    "  N returned from who was gone, N of them free, N leased; new from N",
    "data N complete of N sample; epoch N: N",
    "",
    "journal holds N record, I3 I9",
    "chain holds N commit, I1 I3",
    "views holds N view, I1 I2 I3 I8",
    "contributions holds N contribution, I2",
    "rollbacks nothing to check N rollback, I1 I2 I3 I7",
    "snapshots nothing to check N snapshot, I3 I7 I8",
    "leases holds N sample, I7",
    "certificates holds N certificate, I1 I2 I3 I7 I9",
    "logs holds N line, I1 I2 I3 I5 I7 I8",
    "checkpoints holds N checkpoint, I1 I3 I7 I9",
    "",
]

BY_CHANCE = (
    # Dialling side by side gives up the candidates that lose.
    "TIME INFO isthmus.collective.transport.refusal_log connection_ended host=",
    # How much of the state a newcomer fetches or replays depends on what is committed meanwhile.
    "TIME INFO isthmus.elastic.learner.state_sync ",
    # A busy machine stands still for seconds, and a member is late or dropped, and comes back.
    "TIME INFO isthmus.trainer.record.chronicle view_decided ",
    "TIME INFO isthmus.trainer.record.chronicle learner ",
    "TIME INFO isthmus.trainer.record.chronicle excused ",
    # An excused member follows its round, and has no loss of its own there.
    COMMITTED.replace("loss=N", "loss=none"),
)


def _in_words(line: str) -> str:
    for pattern, word in _WORDS:
        line = re.sub(pattern, word, line)
    return line.rstrip()


def _finished(reason: str) -> str:
    return f"TIME INFO isthmus.trainer.run.daemon finished code=N reason='{reason}'"


def _summary(end: str, *, folder: str, following: str) -> list[str]:
    return [
        f"run RUN {end}",
        "  steps N of N, N commit and N inner steps here",
        "  loss N -> N",
        "  tokens N in DURATION, N a second",
        "  peers N other peer, SIZE sent, SIZE received",
        f"  checkpoint {folder}/checkpoints/step-N",
        f"next: {following}",
        "",
    ]


def _status(*members: str) -> list[str]:
    """Members stand by their ids, so their lines are in the order of the alphabet here."""
    return [
        "run RUN, peer PEER: PHASE",
        "outer step N of N, inner step N of N, view N of N peer",
        "train loss N, validation loss unknown",
        "N token, N a second, goodput N%",
        "sent SIZE, received SIZE",
        "last inner step N s: N token a second (passes N%, clipping N%, update N%, waiting for text N%)",
        "last round N s (exchange N s, planned N s, SIZE) with N peer",
        *members,
        "",
    ]


class Hour:
    """A person at a terminal. `types` runs a command to its end, `starts` one that goes on until it is `read`."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def types(self, *arguments: str) -> tuple[int, list[str]]:
        """Exit code, and what stands on the terminal."""
        process, screen = self.starts(*arguments, folder="")
        process.is_judged = True
        process.popen.wait(TIMEOUT_S)
        return self.read(process, screen)

    def starts(self, *arguments: str, folder: str) -> tuple[Process, Screen]:
        """A command whose peer lives in this folder."""
        screen = Screen()
        place, descriptor = self.run.folder / "runs" / folder, screen.terminal
        process = self.run.start(*arguments, folder=place, terminal=descriptor, errors=descriptor, as_typed=True)
        return process, screen

    def read(self, process: Process, screen: Screen) -> tuple[int, list[str]]:
        """The same of one that has been started, at its end."""
        (code,) = self.run.until_ended(process) if not process.is_judged else [process.popen.returncode]
        screen.close()
        lines = [_in_words(line) for line in screen.lines]
        # Says again and again what a leaving peer waits for, if that takes long.
        lines = [line for line in lines if not line.startswith("leaving: ")]
        members = sorted(line for line in lines if line.startswith("  PEER "))
        return code, [members.pop(0) if line.startswith("  PEER ") else line for line in lines]

    def log_and_rest(self, process: Process, screen: Screen) -> tuple[int, set[str], list[str]]:
        """Of a peer: exit code, the lines of its log, and what else it printed."""
        code, lines = self.read(process, screen)
        log = {line for line in lines if line.startswith("TIME ") and not line.startswith(BY_CHANCE)}
        return code, log, [line for line in lines if not line.startswith("TIME ")]


def _trains(hour: Hour) -> str:
    """From an empty folder to a model in training on two peers, and everything that can be asked meanwhile.

    Returns the folder of the second peer, who has left by then, as the first one has.
    """
    run = hour.run
    written = "run.toml is written: every key is in it, with its meaning and its default; isthmus up -c run.toml"
    assert hour.types("init") == (0, [f"{written} founds a run", ""])
    code, looked = hour.types("doctor")
    # What it warns of differs from one machine to the next; that nothing keeps it from training does not.
    assert code == 0
    assert [line.split()[1] for line in looked if line[:1] in ("✓", "!")] == DOCTOR
    founder, up = hour.starts("up", "-c", "run.toml", "-c", "small.toml", *AT_HOME, folder="hour")
    run.until_step(2, founder)
    ticket = re.search("isthmus join (.*)", up.text)
    assert ticket is not None
    run_id = json.loads((founder.directory / "peer.json").read_bytes())["run_id"]
    other = f"runs/{run_id}"
    joiner, join = hour.starts("join", ticket[1].strip(), *AT_HOME, folder=run_id)
    run.until("rounds of both", lambda: len(founder.commits().keys() & joiner.commits().keys()) > 3)

    several = "isthmus: there are several runs here: runs/hour, runs/RUN; choose one with --dir"
    assert hour.types("status") == (2, [several, ""])
    votes = "round N: N of N vote, N learner, N late"
    me, you = "  PEER ADDRESS (this, coordinator)", "  PEER PATH"
    assert hour.types("status", "--dir", "runs/hour") == (0, _status(votes, PAGE_AT, me, you))
    me, you = "  PEER ADDRESS (this)", "  PEER PATH (coordinator)"
    assert hour.types("status", "--dir", other) == (0, _status(PAGE_AT, me, you))
    assert hour.types("peers", "--dir", other) == (0, [*["PEER member ADDRESS"] * 2, ""])
    assert hour.types("ticket") == (0, [*INVITATION, ""])  # of the one that coordinates
    assert hour.types("ticket", "--dir", other) == (
        5,
        ["isthmus: the coordinator of the run does not live in this folder; name its folder with --dir", ""],
    )

    assert hour.types("leave", "--dir", other) == (0, ["left at outer step N", ""])
    assert hour.log_and_rest(joiner, join) == (
        20,
        {LISTENING, TEXT, NEEDS, READY, VIEW, COMMITTED, _finished("left at outer step N")},
        _summary("was left", folder="runs/RUN", following="isthmus join --dir runs/RUN"),
    )
    assert hour.types("leave") == (0, [LAST_LEFT, ""])
    again = "isthmus up -c run.toml -c small.toml --listen HOME"
    assert hour.log_and_rest(founder, up) == (
        20,
        {LISTENING, TEXT, NEEDS, READY, VIEW, COMMITTED, ADMITTED, _finished(LAST_LEFT)},
        [*INVITATION, *_summary("was left", folder="runs/hour", following=again)],
    )
    for screen in (up, join):
        assert max(map(len, screen.drawn)) < COLUMNS
        assert any(_LIVE.fullmatch(line) for line in screen.drawn)
    past = f"nothing runs in runs/hour: its peer of RUN ended with N ({LAST_LEFT}) (DATE)"
    assert hour.types("status", "--dir", "runs/hour") == (
        4,
        [f"isthmus: {past}; give its command again, and it goes on", ""],
    )
    return other


def test_a_first_hour(tmp_path: Path) -> None:
    with running(tmp_path, forks=False, TERM="xterm") as run:
        run.config.unlink()
        (tmp_path / "small.toml").write_text(SMALL)
        hour = Hour(run)
        other = _trains(hour)

        steps = str(Process(tmp_path / "runs" / "hour", run.processes[0].popen, tmp_path).step + 10)
        finished, up = hour.starts("up", "--resume", "runs/hour", "--run.outer_steps", steps, *AT_HOME, folder="hour")
        assert hour.log_and_rest(finished, up) == (
            0,
            {
                LISTENING,
                TEXT,
                NEEDS,
                READY,
                VIEW,
                COMMITTED,
                PUT_ASIDE,
                ADOPTED,
                MOMENTS,
                _finished("the run is complete"),
            },
            [
                *INVITATION,
                *_summary("is complete", folder="runs/hour", following="isthmus export --dir runs/hour"),
            ],
        )
        past = "nothing runs in runs/hour: RUN is complete at outer step N (DATE)"
        cure = (
            "isthmus export --dir runs/hour writes its model, and up --resume runs/hour --run.outer_steps MORE goes on"
        )
        assert hour.types("status", "--dir", "runs/hour") == (4, [f"isthmus: {past}; {cure}", ""])
        assert hour.types("export", "--dir", "runs/hour") == (0, ["model", ""])
        code, text = hour.types("sample", "def ", "--tokens", "20")
        assert (code, "\n".join(text)[:3]) == (0, "def")
        assert hour.types("audit", "runs/hour", other) == (0, AUDIT)

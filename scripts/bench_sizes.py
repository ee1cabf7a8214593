# SPDX-License-Identifier: Apache-2.0
"""Do peers of different size wait for each other, and does their run learn as well? Beside three that are alike.

`scripts/bench sizes`: three real peers (`isthmus up`, `isthmus join`), one with one worker, one with two, and one with
one that gets half the time. All workers are stopped and let go on many times a second (SIGSTOP, SIGCONT), so that
the cores of a small machine are not what decides how fast a peer is. For each peer: inner steps in a round, and for
which share of a round its workers stood still, the exchange included (medians). The held-out loss is taken at as many
committed tokens as all runs have, beside runs of three peers that are alike (constant rate). Exits with 1 if digests
differ, a peer stands still for more than a tenth of a round, or the loss is above that of all equal runs.
"""

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from scripts.chaoslab.process import children, send
from scripts.demo import Demo, DemoFailed, JudgedRun

MOST_WAITED = 0.1
"""Share of a round."""
_WARM_ROUNDS = 4
"""At the beginning, which are not looked at: nothing is measured yet."""
_PERIOD_S = 0.02
_LONGEST_STOP_S = 1.0
"""Of a worker at a time, even if this process wakes up late: its daemon would take it for a hung one."""
_TOKENS_PER_STEP = 8 * 64
"""Of an inner step, as below."""
_JUDGED_ROUNDS = 4
"""The anchor is judged every so many rounds of equal peers."""
_CONFIG = """
[run]
name = "sizes"
[model]
dim = 32
num_layers = 1
num_heads = 2
hidden_dim = 64
seq_len = 64
[data]
limit = "1MB"
[inner]
lr = 4e-3
batch_size = 8
[inner.schedule]
type = "constant"
[members]
start_peers = 3
[checkpoint]
every = 0
[eval]
batches = 8
[metrics]
port = "none"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a peer is: its workers, and the share of the time that they get."""

    name: str
    share: float = 0.2
    flags: tuple[str, ...] = ()


EQUAL = tuple(Size(name=f"equal {number}") for number in range(3))
DIFFERENT = (
    Size(name="1 worker"),
    Size(name="2 workers", flags=("--node.local-workers", "2")),
    Size(name="half the time", share=0.1, flags=("--node.micro-batch", "4")),
)


@dataclass(slots=True, kw_only=True)
class PeerFigures:
    """Of one peer, medians over the rounds."""

    name: str
    inner_steps: float
    waited_share: float
    """Of a round."""


@dataclass(slots=True, kw_only=True)
class Run(JudgedRun):
    """What one run came to."""

    kind: str
    seed: int
    peers: list[PeerFigures] = field(default_factory=list)
    round_s: float = 0.0
    """Median."""


class SizedDemo(Demo):
    """Peers whose workers get a share of the time."""

    def train(self, sizes: Sequence[Size], flags: Sequence[str], result: Run) -> None:
        """A whole run; its figures go into `result`.

        Raises:
            DemoFailed: it came to no end, or digests differ.
        """
        ticket = self.out / "ticket"
        self.start("up", "-c", str(self.config), "--ticket-file", str(ticket), *flags, *sizes[0].flags)
        self.wait_until("ticket", ticket.exists)
        for size in sizes[1:]:
            self.start("join", f"@{ticket}", *size.flags)
        self.wait_for_step(1)  # starting takes all the time there is
        with contextlib.ExitStack() as throttles:
            for peer, size in zip(self.peers, sizes, strict=True):
                throttles.enter_context(throttled(children(peer.process.pid), size.share))
            self.wait_until("end", lambda: all(peer.process.poll() is not None for peer in self.peers))
        codes = [peer.process.returncode for peer in self.peers]
        if any(codes):
            raise DemoFailed(f"exit codes {codes}: see {self.out}/peer-*/console.txt")
        self._read(sizes, result)

    def _read(self, sizes: Sequence[Size], result: Run) -> None:
        digests: dict[int, set[str]] = {}
        tokens: dict[int, int] = {}
        per_step = 1
        for peer, size in zip(self.peers, sizes, strict=True):
            rounds: list[dict[str, float]] = []
            for event in peer.events():
                match event["event"]:
                    case "started":
                        per_step = int(str(event["tokens_per_inner_step"]))
                    case "commit":
                        digests.setdefault(int(str(event["outer_step"])), set()).add(str(event["digest"]))
                    case "commit_decided":
                        tokens[int(str(event["outer_step"]))] = int(str(event["tokens"]))
                    case "evaluate":
                        result.losses[int(str(event["outer_step"]))] = float(str(event["loss"]))
                    case "trained":
                        rounds.append({name: float(str(event[name])) for name in ("t_s", "wait_s", "tokens")})
                    case _:
                        pass
            spans = [(after["t_s"] - before["t_s"], after) for before, after in pairwise(rounds[_WARM_ROUNDS:])]
            result.round_s = statistics.median(span for span, _ in spans)
            result.peers.append(
                PeerFigures(
                    name=size.name,
                    inner_steps=statistics.median(made["tokens"] for _, made in spans) / per_step,
                    waited_share=statistics.median(made["wait_s"] / span for span, made in spans),
                )
            )
        if any(len(of_step) > 1 for of_step in digests.values()):
            raise DemoFailed("digests differ")
        result.tokens = list(accumulate(tokens[step] for step in sorted(tokens)))


@contextlib.contextmanager
def throttled(pids: Sequence[int], share: float) -> Iterator[None]:
    """These processes run for this share of each period, and are stopped for the rest of it.

    A busy machine wakes us late, so they are stopped for as much longer as they really ran.
    """
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            began_s = time.monotonic()
            time.sleep(share * _PERIOD_S)
            send(pids, signal.SIGSTOP)
            ran_s = time.monotonic() - began_s
            time.sleep(min((1.0 - share) / share * ran_s, _LONGEST_STOP_S))
            send(pids, signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def main() -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench sizes", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind; 3")
    parser.add_argument("--outer-steps", type=int, default=40, help="of an equal run; 40")
    parser.add_argument("--inner-steps", type=int, default=20, help="of the fastest in a round; 20")
    parser.add_argument("--kinds", choices=("both", "different"), default="both", help="what is run; both")
    parser.add_argument("--flags", default="", help="more flags for `isthmus up`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs: list[Run] = []
    try:
        for seed in range(1, options.seeds + 1):
            if options.kinds == "both":
                runs.append(_train("equal", EQUAL, seed, options.outer_steps, options))
            # With the steps that are left out it has the same tokens later.
            runs.append(_train("different", DIFFERENT, seed, 2 * options.outer_steps, options))
    except DemoFailed as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    return _judge(runs, options.json)


def _judge(runs: list[Run], path: Path | None) -> int:
    num_tokens = min(run.tokens[max(run.losses) - 1] for run in runs)
    for run in runs:
        run.loss = run.loss_at(num_tokens)
    by_kind = {kind: [run.loss for run in runs if run.kind == kind] for kind in ("equal", "different")}
    for kind, losses in by_kind.items():
        if losses:
            print(f"{kind}: held-out loss at {num_tokens:,} tokens {min(losses):.4f} to {max(losses):.4f}")
    longest = max(peer.waited_share for run in runs for peer in run.peers)
    print(f"longest median wait: {longest:.1%} of a round")
    if path is not None:
        path.write_text(json.dumps({"tokens": num_tokens, "runs": [asdict(run) for run in runs]}, indent=2) + "\n")
    is_worse = by_kind["equal"] and statistics.median(by_kind["different"]) > max(by_kind["equal"])
    return 1 if is_worse or longest > MOST_WAITED else 0


def _train(kind: str, sizes: Sequence[Size], seed: int, outer_steps: int, options: argparse.Namespace) -> Run:
    folder = Path(tempfile.mkdtemp(prefix="bench-sizes-"))
    config = folder / "run.toml"
    config.write_text(_CONFIG)
    every = _JUDGED_ROUNDS * len(sizes) * options.inner_steps * _TOKENS_PER_STEP
    flags = ["--run.outer_steps", str(outer_steps), "--run.seed", str(seed), "--eval.every", str(every)]
    flags += ["--outer.inner_steps", str(options.inner_steps), *options.flags.split()]
    demo, result = SizedDemo(folder, config, outer_steps, 900.0), Run(kind=kind, seed=seed)
    try:
        demo.train(sizes, flags, result)
    finally:
        demo.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"  {kind}, seed {seed}: rounds of {result.round_s:.2f} s", flush=True)
    for peer in result.peers:
        print(f"    {peer.name}: {peer.inner_steps:g} inner steps, waited {peer.waited_share:.1%}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())

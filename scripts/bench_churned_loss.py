# SPDX-License-Identifier: Apache-2.0
"""Does churn harm the model? Calm runs with several seeds, and runs whose peers are killed and frozen all the time.

`scripts/bench churned_loss`: real peers (`isthmus up`, `isthmus join`) train configs/demo.toml with a constant rate.
The held-out loss of a churned run is taken where it has committed as many tokens as the calm ones had at their end,
between the two judged states around it. Which peer trains which samples is a matter of milliseconds, so a seed gives
another loss every time, and one churned run says little. Exits with 1 if the median of the churned runs is above the
worst calm one, or too little happened in one of them.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from scripts.demo import Demo, DemoFailed, JudgedRun

ROOT = Path(__file__).resolve().parent.parent
NUM_PEERS = 3
FREEZE_S = (1.0, 8.0)
CHURNED_STEPS = 3
"""A churned run has so many times the outer steps of a calm one at hand: it ends when it has the tokens."""


@dataclass(slots=True, kw_only=True)
class Run(JudgedRun):
    """What one run came to."""

    seed: int
    kills: int = 0
    freezes: int = 0
    fewest_members: int = 0


class ChurnedDemo(Demo):
    """The demo's processes, with faults at random times. The founder lives: it holds the journal that is read."""

    def __init__(
        self, out: Path, *, seed: int, outer_steps: int, deadline_s: float, pause_s: tuple[float, float]
    ) -> None:
        super().__init__(out, ROOT / "configs" / "demo.toml", outer_steps, deadline_s)
        self.pause_s = pause_s
        self.result = Run(seed=seed)

    def run_until(self, is_over: Callable[[], bool], *, churns: bool) -> Run:
        """Train until then; returns what came of it."""
        ticket, result = self.out / "ticket", self.result
        flags = ["--run.outer_steps", str(self.outer_steps), "--run.seed", str(result.seed), "--eval.every", "1"]
        flags += ["--inner.schedule.type", "constant", "--members.grace", "2s"]
        self.start("up", "-c", str(self.config), "--ticket-file", str(ticket), *flags)
        self.wait_until("ticket", ticket.exists)
        for _ in range(NUM_PEERS - 1):
            self.start("join", f"@{ticket}")
        if churns:
            self.wait_until("first commits", lambda: self._read() > 2)
            self._churn(is_over, f"@{ticket}")
        else:
            self.wait_until("end", is_over)
        self._read()
        return result

    def _read(self) -> int:
        """Take in what the founder and who judged have written down; returns the newest outer step."""
        tokens: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for event in self.peers[0].events():
            if event["event"] == "commit_decided":
                step = event["outer_step"]
                tokens[step], sizes[step] = event["tokens"], len(event["members"])
        for peer in self.peers:
            judged = (event for event in peer.events() if event["event"] == "evaluate")
            self.result.losses |= {event["outer_step"]: event["loss"] for event in judged}
        self.result.tokens = list(accumulate(tokens[step] for step in sorted(tokens)))
        self.result.fewest_members = min(sizes.values(), default=0)
        return len(tokens)

    def has_judged(self, outer_step: int) -> bool:
        """Whether the held-out loss of this state is known."""
        self._read()
        return outer_step in self.result.losses

    def has_tokens(self, num_tokens: int) -> bool:
        """Whether as much is committed and judged."""
        self._read()
        run = self.result
        return any(step <= len(run.tokens) and run.tokens[step - 1] >= num_tokens for step in run.losses)

    def _churn(self, is_over: Callable[[], bool], ticket: str) -> None:
        rng = random.Random(self.result.seed)
        while not is_over():
            self._wait(rng.uniform(*self.pause_s))
            victim = rng.choice(self.peers[1:NUM_PEERS])
            if victim.process.poll() is not None:
                again = self.start("join", ticket, directory=victim.directory)
                self.peers.remove(again)
                self.peers[self.peers.index(victim)] = again
            elif rng.random() < 0.5:
                victim.process.send_signal(signal.SIGSTOP)
                self._wait(rng.uniform(*FREEZE_S))
                victim.process.send_signal(signal.SIGCONT)
                self.result.freezes += 1
            else:
                victim.process.kill()
                victim.process.wait()
                self.result.kills += 1

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.wait_until("pause", lambda: time.monotonic() >= end)


def main() -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench churned_loss", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind; 5")
    parser.add_argument("--outer-steps", type=int, default=40, help="of a calm run; 40")
    parser.add_argument("--pause-s", type=_pair, default=(8.0, 15.0), metavar="A,B", help="between two faults; 8,15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        calm, churned = _measure(options.seeds, options.outer_steps, options.pause_s)
    except DemoFailed as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    _print("calm", calm)
    _print("churned", churned)
    if options.json:
        figures = {"calm": [asdict(run) for run in calm], "churned": [asdict(run) for run in churned]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if any(run.kills + run.freezes < NUM_PEERS for run in churned):
        print("bench: too little happened to say anything", file=sys.stderr)
        return 1
    return 0 if statistics.median(run.loss for run in churned) <= max(run.loss for run in calm) else 1


def _print(kind: str, runs: list[Run]) -> None:
    losses = [run.loss for run in runs]
    print(f"{kind}, {len(runs)} runs: held-out loss {min(losses):.4f} to {max(losses):.4f}", end="")
    print(f" (median {statistics.median(losses):.4f})")


def _pair(text: str) -> tuple[float, float]:
    shortest, longest = map(float, text.split(","))
    return shortest, longest


def _measure(num_seeds: int, outer_steps: int, pause_s: tuple[float, float]) -> tuple[list[Run], list[Run]]:
    """All runs, calm and churned in turn; the first calm one says how many tokens."""
    calm: list[Run] = []
    churned: list[Run] = []
    for seed in range(1, num_seeds + 1):
        calm.append(_train(seed, outer_steps, None, pause_s))
        print(f"  calm, seed {seed}: {calm[-1].losses[outer_steps]:.4f}", flush=True)
        num_tokens = calm[0].tokens[-1]
        run = _train(seed, CHURNED_STEPS * outer_steps, num_tokens, pause_s)
        run.loss = run.loss_at(num_tokens)
        churned.append(run)
        print(f"  churned, seed {seed}: {run.loss:.4f} after {run.kills} SIGKILLs and {run.freezes} SIGSTOPs, ", end="")
        print(f"{run.fewest_members} to {NUM_PEERS} members, {len(run.tokens)} outer steps", flush=True)
    num_tokens = min(run.tokens[-1] for run in calm)
    for run in calm + churned:
        run.loss = run.loss_at(num_tokens)
    return calm, churned


def _train(seed: int, outer_steps: int, num_tokens: int | None, pause_s: tuple[float, float]) -> Run:
    """One run: to its end, or until so many tokens are committed under churn."""
    folder = Path(tempfile.mkdtemp(prefix="churned-loss-"))
    demo = ChurnedDemo(folder, seed=seed, outer_steps=outer_steps, deadline_s=900.0, pause_s=pause_s)
    try:
        if num_tokens is None:
            return demo.run_until(lambda: demo.has_judged(outer_steps), churns=False)
        return demo.run_until(lambda: demo.has_tokens(num_tokens), churns=True)
    finally:
        demo.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

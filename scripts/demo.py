# SPDX-License-Identifier: Apache-2.0
"""Three peers on this machine train one model; one is killed, one joins late, one leaves; the rest end equal.

Every peer is what a user would start: `isthmus up`, `isthmus join`, `isthmus leave`, each with its own processes.
The script watches the peers' own event logs, breaks things at set outer steps, and adds up what happened
(demo_report.py).
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from isthmus.trainer.record.event_log import FILE_NAME, read_events
from scripts import demo_report

ROOT = Path(__file__).resolve().parent.parent
ISTHMUS = str(Path(sys.executable).parent / "isthmus")
POLL_INTERVAL_S = 0.05


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


@dataclass(slots=True)
class Peer:
    """One `isthmus` process with its directory."""

    name: str
    directory: Path
    process: subprocess.Popen[bytes]

    def events(self) -> Iterator[demo_report.Event]:
        """What the peer has written down so far."""
        return read_events(self.directory / FILE_NAME)


@dataclass(slots=True, kw_only=True)
class JudgedRun:
    """How a run learnt: for benchmarks that compare losses."""

    tokens: list[int] = field(default_factory=list)
    """Committed so far, by outer step from 1 on."""
    losses: dict[int, float] = field(default_factory=dict)
    """On held-out text, by outer step."""
    loss: float = float("nan")
    """At the tokens that are compared."""

    def loss_at(self, num_tokens: int) -> float:
        """Held-out loss after so many committed tokens, between the judged states around it."""
        points = [
            (self.tokens[step - 1], loss) for step, loss in sorted(self.losses.items()) if step <= len(self.tokens)
        ]
        for (before, worse), (after, better) in pairwise(points):
            if before <= num_tokens <= after:
                return worse + (better - worse) * (num_tokens - before) / (after - before)
        raise DemoFailed(f"no judged state around {num_tokens} tokens")


class Demo:
    """Starts the peers, follows their events and breaks things on time."""

    def __init__(self, out: Path, config: Path, outer_steps: int, deadline_s: float) -> None:
        self.out = out
        self.config = config
        self.outer_steps = outer_steps
        self.deadline = time.monotonic() + deadline_s
        self.peers: list[Peer] = []
        self.faults: list[demo_report.Fault] = []

    def start(self, *arguments: str, directory: Path | None = None) -> Peer:
        """Start one peer, in a folder of its own. Its messages go to its own file, for whoever wants to know."""
        directory = directory or self.out / f"peer-{len(self.peers)}"
        directory.mkdir(parents=True, exist_ok=True)
        # One thread each: three peers share this machine's cores.
        command = [ISTHMUS, *arguments, "--dir", str(directory), "--node.threads", "1"]
        with (directory / "console.txt").open("ab") as console:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=console,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        peer = Peer(directory.name, directory, process)
        self.peers.append(peer)
        return peer

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something the peers do.

        Raises:
            DemoFailed: if the founder ended meanwhile or the time is up.
        """
        while not condition():
            code = self.peers[0].process.poll() if self.peers else None
            if code not in (None, 0):
                raise DemoFailed(f"the founder ended with exit code {code}: see {self.out}/peer-0/console.txt")
            if time.monotonic() > self.deadline:
                raise DemoFailed(f"no {what} in time: see {self.out}/peer-*/console.txt")
            time.sleep(POLL_INTERVAL_S)

    def wait_for_step(self, outer_step: int) -> None:
        """Wait until the founder has committed this outer step."""
        founder = self.peers[0]
        self.wait_until(
            f"outer step {outer_step}",
            lambda: any(e["event"] == "commit" and int(str(e["outer_step"])) >= outer_step for e in founder.events()),
        )

    def note(self, kind: str, peer: Peer) -> None:
        """Remember when something was broken."""
        fault = demo_report.Fault(kind=kind, peer=peer.name, wall=time.time())  # noqa: TID251 - as in the event logs
        self.faults.append(fault)
        print(f"  {kind}: {peer.name}", flush=True)

    def run(self) -> None:
        """The whole story."""
        ticket = self.out / "ticket"
        steps = ["--run.outer_steps", str(self.outer_steps)]
        self.start("up", "-c", str(self.config), "--ticket-file", str(ticket), *steps)
        self.wait_until("ticket", ticket.exists)
        for _ in range(2):
            self.start("join", f"@{ticket}")
        print(f"  3 peers started, {self.outer_steps} outer steps", flush=True)

        self.wait_for_step(self.outer_steps // 3)
        victim = self.peers[1]
        self.note("sigkill", victim)
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()

        self.wait_for_step(self.outer_steps // 2)
        joiner = self.start("join", f"@{ticket}")
        self.note("join", joiner)

        self.wait_for_step(self.outer_steps * 2 // 3)
        leaver = self.peers[2]
        self.note("leave", leaver)
        subprocess.run([ISTHMUS, "leave", "--dir", str(leaver.directory)], cwd=ROOT, check=True)

        self.wait_until("end", lambda: all(peer.process.poll() is not None for peer in self.peers))
        codes = {peer.name: peer.process.returncode for peer in self.peers}
        wanted = {peer.name: 0 for peer in self.peers} | {victim.name: -signal.SIGKILL, leaver.name: 20}
        if codes != wanted:
            raise DemoFailed(f"exit codes {codes}, expected {wanted}: see {self.out}/peer-*/console.txt")

    def export(self) -> None:
        """Write the trained model from the founder's last checkpoint."""
        command = [ISTHMUS, "export", "--dir", str(self.peers[0].directory)]
        subprocess.run([*command, "--out", str(self.out / "model")], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def audit(self) -> None:
        """Let the run prove itself; raises DemoFailed if something does not hold."""
        folders = [str(peer.directory) for peer in self.peers]
        done = subprocess.run([ISTHMUS, "audit", *folders], cwd=ROOT, check=False, capture_output=True, text=True)
        (self.out / "audit.txt").write_text(done.stdout)
        if done.returncode:
            raise DemoFailed(f"the audit fails: {done.stderr.strip()}")
        print("  isthmus audit: every check holds", flush=True)

    def stop(self) -> None:
        """Leave no process behind, whatever happened."""
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.process.kill()
            peer.process.wait()


def main() -> int:
    """Run the demo; 0 if everything that it claims holds."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="where the results go")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo.toml")
    parser.add_argument("--outer-steps", type=int, default=30)
    parser.add_argument("--deadline", type=float, default=600.0, help="give up after this many seconds")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the peers are stopped then, too
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    began = time.monotonic()
    demo = Demo(options.out, options.config, options.outer_steps, options.deadline)
    try:
        demo.run()
        demo.export()
        demo.audit()
    except DemoFailed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return 1
    finally:
        demo.stop()
    report = demo_report.Report.read(options.out, [peer.directory for peer in demo.peers], demo.faults)
    summary = report.summary() | {"seconds": round(time.monotonic() - began, 1)}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    report.plot(options.out / "loss.png")
    report.print_table(summary)
    problems = report.problems(summary)
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

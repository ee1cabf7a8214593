# SPDX-License-Identifier: Apache-2.0
"""What a demo run did, read from the peers' event logs and the coordinator's journal; nothing is taken on trust."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import CommitRecord, LeaseRecord, Record, ReleaseRecord
from isthmus.elastic.journal.reader import read_journal
from isthmus.trainer.record.event_log import FILE_NAME, read_events

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that was done to a peer, and when (seconds of the wall clock, as the event logs have it)."""

    kind: str
    peer: str
    wall: float


def wall_s(event: Event) -> float:
    """When it happened, in seconds of the wall clock."""
    return datetime.fromisoformat(event["wall"]).timestamp()


@dataclass(slots=True)
class Report:
    """All events of all peers, and the journal."""

    events: dict[str, list[Event]]
    faults: list[Fault]
    records: Sequence[Record]

    @classmethod
    def read(cls, out: Path, directories: Sequence[Path], faults: list[Fault]) -> "Report":
        """Read every log; also writes them merged into `out/events.jsonl`."""
        events = {directory.name: list(read_events(directory / FILE_NAME)) for directory in directories}
        merged = sorted(
            (event | {"directory": name} for name, log in events.items() for event in log), key=lambda e: e["wall"]
        )
        with (out / "events.jsonl").open("w") as lines:
            lines.writelines(json.dumps(event) + "\n" for event in merged)
        founder = directories[0]
        return cls(events, faults, read_journal(founder / "journal.sqlite").records)

    def commits(self, peer: str) -> list[Event]:
        """The commits that this peer took part in, in order."""
        return self._of_kind("commit", peer)

    def _of_kind(self, kind: str, peer: str | None = None) -> list[Event]:
        logs = self.events.values() if peer is None else [self.events[peer]]
        return [event for log in logs for event in log if event["event"] == kind]

    # -------------------------------------------------------------------------------- figures

    def summary(self) -> dict[str, Any]:
        """The figures, in the form that the README documents."""
        founder = next(iter(self.events))
        commits = self.commits(founder)
        losses = [event["loss"] for event in self._of_kind("trained", founder) if event["loss"] is not None]
        validation = sorted(self._of_kind("evaluate"), key=lambda event: event["outer_step"])
        final = {peer: log[-1]["digest"] for peer in self.events if (log := self.commits(peer)) and log[-1]["final"]}
        bytes_sent = sum(event["bytes_sent"] for event in self._of_kind("round"))
        data_parallel = self._bytes_data_parallel()
        return {
            "outer_steps": commits[-1]["outer_step"],
            "digests_equal": self._digests_equal() and len(set(final.values())) == 1,
            "final_digest": final,
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "val_loss_last": validation[-1]["loss"] if validation else None,
            "peers_started": len(self.events),
            "faults": [self._fault(fault) for fault in self.faults],
            "join": self._join(),
            "bytes_sent": bytes_sent,
            "bytes_data_parallel": data_parallel,
            "reduction": round(data_parallel / bytes_sent, 1) if bytes_sent else None,
            "tokens": sum(c.num_tokens for r in self.records if isinstance(r, CommitRecord) for c in r.contributions),
            "leases": self._leases(),
        }

    def problems(self, summary: dict[str, Any]) -> list[str]:
        """What the demo claims and this run did not show."""
        checks = {
            "the peers' digests differ": summary["digests_equal"],
            "the loss did not fall below three quarters": summary["loss_last"] < 0.75 * summary["loss_first"],
            "a sample was consumed twice": summary["leases"]["duplicated"] == 0,
            "a fault was not recovered": all(f["recovery_s"] is not None for f in summary["faults"]),
            "the late peer never took part": summary["join"]["seconds"] is not None,
        }
        return [problem for problem, holds in checks.items() if not holds]

    def _digests_equal(self) -> bool:
        digests: dict[int, set[str]] = defaultdict(set)
        for peer in self.events:
            for event in self.commits(peer):
                digests[event["outer_step"]].add(event["digest"])
        return all(len(seen) == 1 for seen in digests.values())

    def _round_s(self) -> float:
        """Median seconds from commit to commit at the founder while nothing was broken yet."""
        first_fault = min((fault.wall for fault in self.faults), default=float("inf"))
        times = [t for event in self.commits(next(iter(self.events))) if (t := wall_s(event)) < first_fault]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def _fault(self, fault: Fault) -> dict[str, Any]:
        """`next_commit_s`: fault to next commit; `recovery_s`: what of it is beyond a calm round."""
        commits = [wall_s(event) for event in self.commits(next(iter(self.events)))]
        after = [t - fault.wall for t in commits if t > fault.wall]
        recovery = max(0.0, after[0] - self._round_s()) if after else None
        return {
            "kind": fault.kind,
            "peer": fault.peer,
            "t_s": round(fault.wall - wall_s(next(iter(self.events.values()))[0]), 2),
            "next_commit_s": round(after[0], 2) if after else None,
            "recovery_s": None if recovery is None else round(recovery, 2),
        }

    def _join(self) -> dict[str, Any]:
        """`seconds`: command to first commit as a member; `stall_s`: what members waited beyond a calm round."""
        fault = next(fault for fault in self.faults if fault.kind == "join")
        commits = self.commits(fault.peer)
        if not commits:
            return {"seconds": None, "stall_s": None}
        first = commits[0]["outer_step"]
        waits = {event["outer_step"]: event["wait_s"] for event in self._of_kind("trained", next(iter(self.events)))}
        calm = statistics.median(wait for step, wait in waits.items() if step < first)
        return {
            "seconds": round(wall_s(commits[0]) - fault.wall, 2),
            "stall_s": round(max(0.0, waits[first] - calm), 3),
        }

    def _bytes_data_parallel(self) -> int:
        """What fp32 gradient all-reduces of the same samples would have sent: 2 (M−1)/M · 4 N a peer and inner step."""
        started = next(event for event in next(iter(self.events.values())) if event["event"] == "started")
        total = 0.0
        for record in self.records:
            if isinstance(record, CommitRecord):
                world_size = len(record.contributions)
                inner_steps = sum(c.num_tokens for c in record.contributions) / started["tokens_per_inner_step"]
                total += inner_steps * 2 * (world_size - 1) / world_size * 4 * started["num_parameters"]
        return round(total)

    def _leases(self) -> dict[str, int]:
        issued = sum(_count(record.ranges) for record in self.records if isinstance(record, LeaseRecord))
        returned = sum(_count(record.ranges) for record in self.records if isinstance(record, ReleaseRecord))
        indices = [
            index
            for record in self.records
            if isinstance(record, CommitRecord)
            for contribution in record.contributions
            for piece in contribution.consumed
            for index in range(piece.start, piece.stop)
        ]
        return {
            "issued": issued,
            "consumed": len(indices),
            "returned": returned,
            "duplicated": len(indices) - len(set(indices)),
        }

    # -------------------------------------------------------------------------------- for people

    def plot(self, path: Path) -> None:
        """Training loss of every peer and held-out loss over all peers' tokens, with what was broken when."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        tokens_at = self._tokens_at()
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        for peer in self.events:
            trained = [event for event in self._of_kind("trained", peer) if event["loss"] is not None]
            points = [(tokens_at[event["outer_step"]], event["loss"]) for event in trained]
            axes.plot(*zip(*points, strict=True), label=f"{peer}, training", linewidth=1.4, alpha=0.8)
        held_out = sorted((tokens_at.get(e["outer_step"], 0), e["loss"]) for e in self._of_kind("evaluate"))
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "k.--", label="held out (anchor)", linewidth=1)
        commits = self.commits(next(iter(self.events)))
        top = axes.get_ylim()[1]
        for fault in self.faults:
            step = max((e["outer_step"] for e in commits if wall_s(e) <= fault.wall), default=0)
            axes.axvline(tokens_at.get(step, 0), color="grey", linestyle=":", linewidth=1)
            axes.text(tokens_at.get(step, 0), top, f" {fault.kind}\n {fault.peer}", va="top", fontsize=8)
        axes.set(xlabel="tokens of all peers, committed", ylabel="loss (nats a byte)", title="isthmus demo")
        axes.legend(loc="upper right")
        axes.grid(alpha=0.25)
        figure.savefig(path, dpi=130)

    def _tokens_at(self) -> dict[int, int]:
        total, tokens_at = 0, {0: 0}
        for record in self.records:
            if isinstance(record, CommitRecord):
                total += sum(contribution.num_tokens for contribution in record.contributions)
                tokens_at[record.outer_step] = total
        return tokens_at

    def print_table(self, summary: dict[str, Any]) -> None:
        """The summary as a person wants to read it."""
        print()
        for peer in self.events:
            commits = self.commits(peer)
            digest = f"{commits[-1]['digest'][:16]} at outer step {commits[-1]['outer_step']}" if commits else "-"
            print(f"  {peer}   {len(commits):3d} commits   last digest {digest}")
        for fault in summary["faults"]:
            print(f"  {fault['kind']} of {fault['peer']}: next commit after {fault['next_commit_s']} s")
        leases = summary["leases"]
        print(f"  training loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}, held out", end=" ")
        print(f"{summary['val_loss_last']:.3f}, {summary['tokens']:,} tokens in {summary['seconds']} s")
        print(
            f"  {leases['consumed']:,} samples consumed, {leases['duplicated']} twice, {leases['returned']:,} returned"
        )
        print(f"  sent {summary['bytes_sent'] / 1e6:.1f} MB, {summary['reduction']}x less than data parallel")
        print(f"  final digests equal: {summary['digests_equal']}")


def _count(ranges: Sequence[IndexRange]) -> int:
    return sum(len(piece) for piece in ranges)

# SPDX-License-Identifier: Apache-2.0
"""The verdict for people and as JSON."""

import dataclasses
import math
from collections import Counter
from typing import Any

from isthmus.elastic.core.records import CommitRecord, LeaseRecord, ViewRecord
from scripts.chaoslab.evidence import Evidence, Wait
from scripts.chaoslab.recovery import calm_round_s, recoveries, table

_MAX_TOLD = 5


def summary(evidence: Evidence, wrong: dict[str, list[str]], *, seed: int, num_peers: int) -> dict[str, Any]:
    """All figures; JSON has no infinity, so null stands for what never came."""
    found = recoveries(evidence)
    faults = [
        dataclasses.asdict(fault)
        | {"at_s": round(fault.at_s - evidence.began_s, 3)}
        | {"over_s": None if fault.over_s is None else round(fault.over_s - evidence.began_s, 3)}
        | {"recovery": {item.what: _finite(item.seconds) for item in found if item.fault is fault}}
        | {"alone": all(item.is_alone for item in found if item.fault is fault)}
        for fault in evidence.faults
    ]
    return {
        "schema": "isthmus.chaos/1",
        "seed": seed,
        "peers": num_peers,
        "seconds": round(evidence.ended_s - evidence.began_s, 1),
        "holds": not any(wrong.values()),
        "wrong": wrong,
        "checked": counts(evidence),
        "calm_round_s": _finite(calm_round_s(evidence)),
        "faults_by_kind": dict(Counter(fault.kind for fault in evidence.faults)),
        "waits": waits(evidence),
        "recovery": {
            row.what: {name: _finite(value) for name, value in dataclasses.asdict(row).items() if name != "what"}
            | {"holds": row.holds}
            for row in table(evidence)
        },
        "faults": faults,
    }


def counts(evidence: Evidence) -> dict[str, int]:
    """How much there was to check."""
    records = evidence.records
    return {
        "commits": sum(isinstance(record, CommitRecord) for record in records),
        "views": sum(isinstance(record, ViewRecord) for record in records),
        "leases": sum(isinstance(record, LeaseRecord) for record in records),
        "samples": sum(
            item.stop - item.start
            for record in records
            if isinstance(record, CommitRecord)
            for part in record.contributions
            for item in part.consumed
        ),
        "digests": sum(1 for log in evidence.logs for _ in log.named("commit", "commit_decided", "catch_up", "vote")),
        "waits": len(evidence.waits),
        "starts": evidence.num_starts,
        "journals_read_back": len(evidence.glimpses),
    }


def waits(evidence: Evidence) -> dict[str, dict[str, float]]:
    """What was waited for from outside: how often, the longest with its place and time, and what it may take."""
    by_what: dict[str, list[Wait]] = {}
    for wait in evidence.waits:
        by_what.setdefault(wait.what, []).append(wait)
    longest = {what: max(all_, key=lambda wait: wait.seconds) for what, all_ in sorted(by_what.items())}
    return {
        what: {
            "count": len(by_what[what]),
            "max_s": round(one.seconds, 3),
            "limit_s": one.limit_s,
            "site": one.site,
            "at_s": round(one.at_s - evidence.began_s, 3),
        }
        for what, one in longest.items()
    }


def lines(summary_: dict[str, Any]) -> list[str]:
    """The table in the end."""
    checked = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary_["checked"].items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary_["faults_by_kind"].items())
    round_s = summary_["calm_round_s"]
    told = [
        "",
        f"{summary_['seconds']:.0f} s, {summary_['peers']} peers, seed {summary_['seed']}; faults: {kinds}",
        f"checked: {checked}",
        f"calm round: {'unknown' if round_s is None else f'{round_s:.2f} s'}",
        "",
        "until the next commit     count   median s      p99 s      max s   limit s",
    ]
    for what, row in summary_["recovery"].items():
        numbers = " ".join(f"{_number(row[name]):>10}" for name in ("median_s", "p99_s", "max_s"))
        limit = "" if row["limit_s"] is None else f"{row['limit_s']:.2f}{'' if row['holds'] else '  MISSED'}"
        told.append(f"{what:<24} {row['count']:>6} {numbers}   {limit:>7}".rstrip())
    told += ["", "waited for                                                  count      max s   limit s"]
    for what, row in summary_["waits"].items():
        told.append(f"{what:<58} {row['count']:>6} {row['max_s']:>10.2f} {row['limit_s']:>9.2f}")
    told.append("")
    for name, sentences in summary_["wrong"].items():
        told.append(f"{name:<10} {'holds' if not sentences else f'{len(sentences)} WRONG'}")
        told += [f"    {sentence}" for sentence in sentences[:_MAX_TOLD]]
        if len(sentences) > _MAX_TOLD:
            told.append(f"    and {len(sentences) - _MAX_TOLD} more")
    return told


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def _finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(value, 3) if isinstance(value, float) else value

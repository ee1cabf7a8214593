# SPDX-License-Identifier: Apache-2.0
"""An audit for people and for programs. Schema `isthmus.audit/1`; fields are added without a new one."""

from collections.abc import Iterator, Sequence

import msgspec

from isthmus.elastic.audit import Finding, SampleCount, Verdict
from isthmus.trainer.audit.audit import RunAudit
from isthmus.trainer.record.status import count

SCHEMA = "isthmus.audit/1"

_WIDTH = 15
_MAX_SHOWN = 10


def audit_as_json(audit: RunAudit) -> str:
    """One object, with everything that was found."""
    proved = audit.proved
    document = {
        "schema": SCHEMA,
        "holds": audit.holds,
        "run_id": audit.run_id,
        "journal": str(audit.journal),
        "archives": [str(path) for path in audit.archives],
        "first_record": audit.first_record,
        "folders": [str(folder) for folder in audit.folders],
        "account": proved.account,
        "samples": proved.samples,
        "exactly_once": proved.samples.exactly_once,
        "deviants": audit.deviants,
        "seals_checked": audit.knows_authorities,
        "missing_logs": [{"folder": str(item.folder), "number": item.number} for item in audit.missing_logs],
        "checks": [msgspec.to_builtins(verdict) | {"holds": verdict.holds} for verdict in audit.verdicts],
    }
    return msgspec.json.encode(document).decode()


def render_audit(audit: RunAudit) -> str:
    """The report for people: a label, then a line; no colours."""
    facts = [*_run(audit), *_peers(audit), *_samples(audit.proved.samples)]
    has_certificates = any(item.check == "certificates" and item.num_looked_at for item in audit.verdicts)
    if has_certificates and not audit.knows_authorities:
        facts.append(("seals", "not checked: none of these folders knows the run's authorities"))
    facts.extend(
        ("logs", f"{count(item.number, 'older file')} of {item.folder} gone: what was in them is not checked")
        for item in audit.missing_logs
    )
    lines = [*facts, ("", ""), *_verdicts(audit.verdicts)]
    return "\n".join(f"{label:<{_WIDTH}}{text}".rstrip() for label, text in lines)


def _run(audit: RunAudit) -> Iterator[tuple[str, str]]:
    account = audit.proved.account
    yield "run", audit.run_id or "unknown"
    more = f" with {count(len(audit.archives), 'archive')}" if audit.archives else ""
    yield "journal", f"{audit.journal}{more}, {count(account.num_records, 'record')}"
    if first := audit.first_record:
        yield "", f"{count(first, 'older record')} are in archives that are not here: what they say is not checked,"
        yield "", f"and what the snapshot in record {first} says of them is believed; all after it is checked"
    end = "complete" if account.is_complete else "not complete"
    lost = "; the journal of what was before is lost" if account.is_rebuilt else ""
    yield "outer steps", f"{account.first_step:,} to {account.outer_step:,}, {end}{lost}"
    for item in account.given_up[-_MAX_SHOWN:]:
        lost = f"{count(item.num_samples, 'sample')} and {count(item.num_tokens, 'token')} given up"
        yield "went back", f"from step {item.from_step:,} to step {item.to_step:,} at epoch {item.epoch}: {lost}"
    members = f", {account.fewest_members} to {account.most_members} members a commit" if account.num_commits else ""
    yield "views", f"{account.num_views:,}, the last is epoch {account.epoch}{members}"


def _peers(audit: RunAudit) -> Iterator[tuple[str, str]]:
    account = audit.proved.account
    shares = account.shares
    starts = sum(share.num_starts for share in shares)
    yield "peers", f"{len(shares):,} in {count(starts, 'start')}, {account.num_tokens:,} tokens"
    for share in shares:
        part = share.num_tokens / account.num_tokens if account.num_tokens else 0.0
        yield (
            "",
            f"{share.peer_id}  {share.num_tokens:>13,} tokens {part:>6.1%} {share.num_commits:>8,} commits "
            f"{share.num_samples:>11,} samples",
        )
    yield "departures", count(len(account.departures), "member")
    for departure in account.departures[-_MAX_SHOWN:]:
        yield "", f"{departure.peer_id}  at step {departure.outer_step:,}: {departure.cause}"
    said = ", ".join(f"{item.peer_id} at step {item.outer_step}" for item in audit.deviants[:_MAX_SHOWN])
    yield "other votes", said or "none"


def _samples(samples: SampleCount) -> Iterator[tuple[str, str]]:
    once = "each once" if samples.exactly_once else f"{samples.num_uses:,} times"
    yield "samples", f"{samples.num_used_up:,} used up by commits, {once}"
    yield (
        "",
        (
            f"{samples.num_returns:,} returned from who was gone, {samples.num_free:,} of them free, "
            f"{samples.num_leased:,} leased; new from {samples.next_index:,}"
        ),
    )
    if (epochs := samples.data_epochs) is not None:
        begun = [f"epoch {item.number}: {item.num_consumed:,}" for item in epochs.begun[:_MAX_SHOWN]]
        text = f"{epochs.num_complete:,} complete of {epochs.num_samples:,} samples"
        yield "data", "; ".join([text, *begun])


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, str]]:
    for verdict in verdicts:
        looked = count(verdict.num_looked_at, verdict.unit.removesuffix("s"))
        what = "holds" if verdict.holds else f"FAILS, {count(verdict.num_findings, 'finding')}"
        if verdict.holds and not verdict.num_looked_at:
            what = "nothing to check"
        yield verdict.check, f"{what:<20}{looked + ',':<24}{' '.join(verdict.invariants)}"
        for finding in verdict.findings[:_MAX_SHOWN]:
            yield "", sentence_of(finding)


def sentence_of(finding: Finding) -> str:
    """A finding in one line."""
    where = "" if finding.slot is None else f", record {finding.slot}"
    return f"{finding.sentence} ({finding.invariant}{where})"

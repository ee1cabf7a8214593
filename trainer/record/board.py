# SPDX-License-Identifier: Apache-2.0
"""A Grafana board of the numbers in metrics.py: one run, all of its peers that Prometheus scrapes.

It is made here and served by each peer (page/), so that the board and the numbers are of one version. It chooses a data
source and a run by variables, and nothing in it is of one installation. Rules: pure. Source: Grafana's "Dashboard JSON
model" (schema 39, Grafana 10.4 and newer).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from string import ascii_uppercase
from typing import Any, Final, Literal

_COLUMNS: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
RUN_METRIC: Final = "isthmus_peer_info"
RUN_LABEL: Final = "run_id"
"""Where the board finds the runs that it lets choose from."""
_OF_RUN: Final = f'on (job, instance) group_left () {RUN_METRIC}{{{RUN_LABEL}="$run"}}'
_QUANTILES: Final = (("half below", 0.5), ("95 % below", 0.95))
_STAT_OPTIONS: Final = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
_BY_PEER: Final = "{{instance}}"

Query = tuple[str, str]
"""A PromQL expression, and what its lines are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    about: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    is_stacked: bool = False
    decimals: int | None = None

    def as_json(self, number: int, *, left: int, top: int, width: int, height: int) -> dict[str, Any]:
        targets = [
            {"refId": letter, "expr": expression, "legendFormat": name, "datasource": _SOURCE}
            for letter, (expression, name) in zip(ascii_uppercase, self.queries, strict=False)
        ]
        defaults: dict[str, Any] = {"unit": self.unit}
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        if self.is_stacked:
            defaults["custom"] = {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": _SOURCE,
            "gridPos": {"x": left, "y": top, "w": width, "h": height},
            "targets": targets,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _STAT_OPTIONS if self.kind == "stat" else {},
        }


def _of_run(metric: str, *, per_second: bool = False) -> str:
    """This number of the run's peers, or how fast it grows, in parentheses."""
    selected = f"rate({metric}[$__rate_interval])" if per_second else metric
    return f"({selected} * {_OF_RUN})"


def _happened(counter: str) -> str:
    """How often it happened to each peer in the time that a point of the graph stands for, in parentheses."""
    return f"(increase(isthmus_{counter}_total[$__rate_interval]) * {_OF_RUN})"


def _quantiles(histogram: str, name: str) -> list[Query]:
    buckets = f"sum by (le) {_of_run(f'isthmus_{histogram}_bucket', per_second=True)}"
    return [(f"histogram_quantile({share}, {buckets})", f"{name}, {words}") for words, share in _QUANTILES]


def _stat(title: str, about: str, expression: str, *, unit: str = "short", decimals: int | None = None) -> _Panel:
    """One number."""
    return _Panel(title=title, about=about, queries=[(expression, "")], unit=unit, decimals=decimals, kind="stat")


def _by_peer(title: str, about: str, metric: str, *, per_second: bool = False, unit: str = "short") -> _Panel:
    """A line for each peer."""
    return _Panel(title=title, about=about, queries=[(_of_run(metric, per_second=per_second), _BY_PEER)], unit=unit)


_NEWEST_LOSS = (
    f"avg({_of_run('isthmus_validation_loss')} and on (job, instance) topk(1, {_of_run('isthmus_validation_tokens')}))"
)
_NOW = (
    _stat("Outer step", "Committed exchanges.", f"max{_of_run('isthmus_outer_step')}", unit="none"),
    _stat("Members", "Of the newest view.", f"max{_of_run('isthmus_world_size')}", unit="none"),
    _stat(
        "Training loss",
        "Mean of the peers, of their last outer step, in nats a token.",
        f"avg{_of_run('isthmus_train_loss')}",
        decimals=4,
    ),
    _stat("Held-out loss", "The newest one, in nats a token. Members measure it by turns.", _NEWEST_LOSS, decimals=4),
    _stat("Tokens a second", "Of all peers together.", f"sum{_of_run('isthmus_tokens_total', per_second=True)}"),
    _stat(
        "Goodput",
        "Share of the time since each peer's start that it spent in inner steps, mean of the peers.",
        f"avg{_of_run('isthmus_goodput_ratio')}",
        unit="percentunit",
    ),
)
_LEARNING = (
    _by_peer("Training loss by peer", "Mean of each peer's last outer step, in nats a token.", "isthmus_train_loss"),
    _by_peer(
        "Held-out loss by peer",
        "Of the anchor, which is the same on all peers, in nats a token; by the peer that measured it.",
        "isthmus_validation_loss",
    ),
)
_INNER_STEPS = (
    _by_peer("Tokens a second by peer", "That each has trained on.", "isthmus_tokens_total", per_second=True),
    _Panel(
        title="Parts of an inner step",
        about="Mean of the peers. Waiting for text; forward and backward; the gradient's norm; the inner optimizer.",
        queries=[
            (f"avg{_of_run(f'isthmus_step_{part}_seconds')}", name)
            for part, name in (("data", "text"), ("passes", "passes"), ("clip", "clipping"), ("update", "update"))
        ],
        unit="s",
        is_stacked=True,
    ),
)
_OUTER_STEPS = (
    _Panel(
        title="Outer steps",
        about="Of all peers: from handing a payload in to its commit, and for how long the workers stood still for it.",
        queries=[*_quantiles("round_seconds", "round"), *_quantiles("wait_seconds", "wait")],
        unit="s",
    ),
    _Panel(
        title="Exchanges against their plan",
        about="How long each peer's newest all-reduce took, and how long the cost model had expected. If it took much"
        " longer, a line is slower than it was measured.",
        queries=[
            (_of_run("isthmus_last_exchange_seconds"), f"{_BY_PEER} took"),
            (_of_run("isthmus_last_exchange_predicted_seconds"), f"{_BY_PEER} expected"),
        ],
        unit="s",
    ),
)
_NETWORK = (
    _by_peer("Sent", "By each peer to others.", "isthmus_sent_bytes_total", per_second=True, unit="Bps"),
    _by_peer("Received", "By each peer from others.", "isthmus_received_bytes_total", per_second=True, unit="Bps"),
)
_COUNTED = (
    "aborts",
    "evictions",
    "lies",
    "worker_deaths",
    "worker_hangs",
    "checkpoint_failures",
    "events_lost",
)
_FAULTS = (
    _Panel(
        title="Faults",
        about="How often, in the time that a point stands for: rounds tried again, peers put out of a view, members"
        " overruled, workers that died or hung, checkpoints that could not be written, lines that the log had no room"
        " for.",
        queries=[(f"sum{_happened(counter)}", counter.replace("_", " ")) for counter in _COUNTED],
    ),
    _Panel(
        title="Connections that were not let in",
        about="By reason, of all peers together.",
        queries=[(f"sum by (reason) {_happened('refused_connections')}", "{{reason}}")],
    ),
)
_ROWS: Final = ((_NOW, 4), (_LEARNING, 9), (_INNER_STEPS, 9), (_OUTER_STEPS, 9), (_NETWORK, 8), (_FAULTS, 8))
"""Panels side by side, and how high they are."""


def grafana_board() -> dict[str, Any]:
    """The board as Grafana imports it."""
    tops = accumulate((height for _, height in _ROWS), initial=0)
    panels: list[dict[str, Any]] = []
    for (row, height), top in zip(_ROWS, tops, strict=False):
        width = _COLUMNS // len(row)
        for index, panel in enumerate(row):
            panels.append(panel.as_json(len(panels) + 1, left=index * width, top=top, width=width, height=height))
    return {
        "uid": "isthmus",
        "title": "isthmus",
        "tags": ["isthmus"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source_variable(), _run_variable()]},
        "panels": panels,
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    names = f"label_values({RUN_METRIC}, {RUN_LABEL})"
    return {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": _SOURCE,
        "definition": names,
        "query": {"query": names, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
    }

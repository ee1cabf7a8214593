# SPDX-License-Identifier: Apache-2.0
"""The Grafana board against the numbers that a peer has; a real Prometheus answers it in test_prometheus.py."""

import json
import re
from itertools import combinations, groupby
from typing import Any

import pytest

from isthmus.trainer.record.board import RUN_METRIC, grafana_board
from isthmus.trainer.record.figures import BLANK
from isthmus.trainer.record.metrics import Metrics

GROWS = {"counter": "_total", "histogram": "_bucket"}


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    return json.loads(json.dumps(grafana_board()))["panels"]


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_it_asks_only_for_numbers_that_peers_have(panels: list[dict[str, Any]]) -> None:
    families = list(Metrics(lambda: BLANK).registry.collect())
    known = {family.name + GROWS.get(family.type, "") for family in families} | {RUN_METRIC}
    asked = {name for text in expressions(panels) for name in re.findall(r"isthmus_\w+", text)}
    assert asked <= known


def test_what_grows_is_shown_as_a_rate_and_nothing_else_is(panels: list[dict[str, Any]]) -> None:
    for text in expressions(panels):
        for name, window in re.findall(r"(isthmus_\w+)(\[\$__rate_interval\])?", text):
            assert bool(window) == name.endswith(("_total", "_bucket")), text


def test_every_query_is_of_the_run_that_was_chosen_and_has_a_letter_of_its_own(panels: list[dict[str, Any]]) -> None:
    assert all(f'{RUN_METRIC}{{run_id="$run"}}' in text for text in expressions(panels))
    for panel in panels:
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))


def test_panels_fill_their_rows_and_none_covers_another(panels: list[dict[str, Any]]) -> None:
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for top, row in groupby(places, key=lambda place: place["y"]):
        assert sum(place["w"] for place in row) == 24, top
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above

# SPDX-License-Identifier: Apache-2.0
"""Places on earth as an emulated network."""

import pytest

from scripts.runlab.places import network_of, round_trip_ms
from scripts.wanlink.scenario import ScenarioError


def test_peers_are_in_the_places_in_turn_and_a_path_takes_half_of_its_round_trip() -> None:
    network = network_of("us-eu-asia", 4)
    assert network.places == ("us", "eu", "asia", "us")
    links = network.scenario.start.links
    assert links["0-1"]["delay_ms"] == 45.0
    assert links["1-2"]["delay_ms"] == 110.0
    assert links["0-3"]["delay_ms"] == 30.0, "two peers in one region are not on one machine"
    assert links["2-3"]["delay_ms"] == 80.0


def test_a_home_sends_less_than_it_receives_and_adds_its_line_to_every_path() -> None:
    network = network_of("eu-home", 2)
    assert network.scenario.start.ports["1"] == {"up_mbit": 20.0, "down_mbit": 100.0}
    assert round_trip_ms("home", "us") == round_trip_ms("us", "home") == 110.0
    assert round_trip_ms("home", "home") == 60.0
    assert (
        network.scenario.start.links["0-1"]["loss_percent"]
        > network_of("eu", 2).scenario.start.links["0-1"]["loss_percent"]
    )


@pytest.mark.parametrize(("name", "num_sites", "words"), [("us-mars", 2, "'mars' is no place"), ("us", 9, "at most 8")])
def test_a_network_that_cannot_be_is_refused_in_a_sentence(name: str, num_sites: int, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        network_of(name, num_sites)

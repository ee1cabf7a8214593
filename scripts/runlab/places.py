# SPDX-License-Identifier: Apache-2.0
"""Places on earth as an emulated network: `us-eu-asia` is one peer in each, and from the fourth on it begins anew.

Round trips are what public clouds have between such regions, rounded; a home is in Europe behind a line that receives
more than it sends. Rules: pure.
"""

from dataclasses import dataclass
from itertools import combinations, cycle, islice

from scripts.wanlink.scenario import PEERS_MAX, Scenario, ScenarioError, Step

ROUND_TRIPS_MS = {
    ("us", "us"): 60.0,
    ("eu", "eu"): 20.0,
    ("asia", "asia"): 70.0,
    ("us", "eu"): 90.0,
    ("us", "asia"): 160.0,
    ("eu", "asia"): 220.0,
}
HOME_MS = 20.0
"""What a line at home adds, there and back."""
LOSS_PERCENT, HOME_LOSS_PERCENT = 0.05, 0.3
CLOUD_MBIT, HOME_UP_MBIT, HOME_DOWN_MBIT = 500.0, 20.0, 100.0
PLACES = ("us", "eu", "asia", "home")


@dataclass(frozen=True, slots=True)
class Network:
    """What is emulated, and where each peer is."""

    scenario: Scenario
    places: tuple[str, ...]


def network_of(name: str, num_sites: int, *, seed: int = 1) -> Network:
    """The network of this name.

    Raises:
        ScenarioError: no such place, or more sites than an emulated network can have.
    """
    known = name.split("-")
    for place in known:
        if place not in PLACES:
            raise ScenarioError(f"--wan {name}: {place!r} is no place; there are {', '.join(PLACES)}, as in us-eu-asia")
    if num_sites > PEERS_MAX:
        raise ScenarioError(f"an emulated network has at most {PEERS_MAX} peers")
    places = tuple(islice(cycle(known), num_sites))
    links, ports = {}, {}
    for one, other in combinations(range(num_sites), 2):
        num_homes = [places[one], places[other]].count("home")
        links[f"{one}-{other}"] = {
            "delay_ms": round_trip_ms(places[one], places[other]) / 2.0,
            "loss_percent": HOME_LOSS_PERCENT if num_homes else LOSS_PERCENT,
        }
    for site, place in enumerate(places):
        up, down = (HOME_UP_MBIT, HOME_DOWN_MBIT) if place == "home" else (CLOUD_MBIT, CLOUD_MBIT)
        ports[str(site)] = {"up_mbit": up, "down_mbit": down}
    return Network(Scenario(peers=num_sites, seed=seed, start=Step(links=links, ports=ports)), places)


def round_trip_ms(one: str, other: str) -> float:
    """There and back, of a packet that no queue delays."""
    added = HOME_MS * [one, other].count("home")
    here, there = ("eu" if place == "home" else place for place in (one, other))
    pair = (here, there) if (here, there) in ROUND_TRIPS_MS else (there, here)
    return ROUND_TRIPS_MS[pair] + added

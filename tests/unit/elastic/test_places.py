# SPDX-License-Identifier: Apache-2.0
"""A full house: who comes back finds a place, and nobody fills the house alone."""

from isthmus.collective.core.types import Epoch
from isthmus.elastic.core.messages import Join, Refused, Welcome
from tests.unit.elastic.machines import MANIFEST, CoordinatorDriver, ref


def comes(driver: CoordinatorDriver, number: int, host: str, *, incarnation: int = 1) -> None:
    join = Join(epoch=Epoch(0), address=f"{host}:{number}", manifest_digest=MANIFEST)
    driver.says(ref(number, incarnation), join)


def full_of_strangers(num_strangers: int) -> CoordinatorDriver:
    """Two members, and the rest of the house filled by one host."""
    driver = CoordinatorDriver(max_peers=2 + num_strangers).with_veterans(1, 2)
    for number in range(100, 100 + num_strangers):
        comes(driver, number, "crowd")
        assert driver.told(number, Welcome)
    return driver


def test_a_member_of_the_last_commit_that_starts_again_finds_a_place() -> None:
    driver = full_of_strangers(3)
    comes(driver, 2, "host2", incarnation=2)
    assert driver.told(2, Welcome, incarnation=2), "its own older start held a place"


def test_a_member_of_the_last_commit_that_was_dropped_finds_a_place_before_strangers() -> None:
    driver = full_of_strangers(3)
    driver.wait(20.0)  # everybody falls silent
    assert driver.member_numbers() == []
    for number in range(100, 105):
        comes(driver, number, "crowd")
    for number in (1, 2):
        comes(driver, number, f"host{number}", incarnation=2)
        assert driver.told(number, Welcome, incarnation=2)
    assert "full" in driver.told(103, Refused).reason, "the newest of them has given way"


def test_who_comes_from_a_host_with_fewer_peers_finds_a_place_and_the_crowd_does_not() -> None:
    driver = full_of_strangers(3)
    comes(driver, 50, "crowd")
    assert "full" in driver.told(50, Refused).reason
    comes(driver, 60, "elsewhere")
    assert driver.told(60, Welcome)
    assert "full" in driver.told(102, Refused).reason
    assert driver.member_numbers() == [1, 2], "members never give way"


def test_in_a_house_full_of_members_there_is_no_place() -> None:
    driver = CoordinatorDriver(max_peers=2).with_veterans(1, 2)
    comes(driver, 3, "host3")
    assert "full" in driver.told(3, Refused).reason

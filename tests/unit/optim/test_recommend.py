# SPDX-License-Identifier: Apache-2.0
"""What is recommended follows the stated policy, from predictions that can be checked by hand."""

import dataclasses
import math

import pytest

from isthmus.optim import Op, outer_types
from isthmus.optim.recommend import (
    CODEC_NBYTES,
    MAX_DELAY,
    Candidate,
    Links,
    Model,
    exchange_s,
    recommend,
    sent_nbytes,
)

FAST = Links(upload=125e6, download=125e6, round_trip_s=0.05)
BILLION = Model(num_parameters=10**9, inner_step_s=1.0, num_layers=24)


def megabits(rate):
    return Links(upload=rate * 1e6 / 8, download=rate * 1e6 / 8, round_trip_s=0.05)


def found(recommendation, method, **settings) -> Candidate:
    (candidate,) = (
        candidate
        for candidate in recommendation.candidates
        if candidate.method == method and all(getattr(candidate, name) == value for name, value in settings.items())
    )
    return candidate


# ------------------------------------------------------------------------------------------------ predictions


def test_a_mean_takes_two_trips_and_nearly_twice_its_bytes():
    """4 peers, 64 MiB, 200 Mbit/s, 150 ms: 4.18 s is the lower bound that the collective layer is measured against."""
    links = Links(upload=25e6, download=25e6, round_trip_s=0.15)
    assert exchange_s(Op.MEAN, 64 * 2**20, links, 4) == pytest.approx(4.18, abs=0.005)
    assert exchange_s(Op.MEAN, 0, links, 4) == 0.15


def test_a_gather_sends_a_payload_to_everybody_else_and_a_pair_one():
    links = Links(upload=1e6, download=2e6, round_trip_s=0.1)
    assert exchange_s(Op.GATHER, 3e6, links, 5) == pytest.approx(12.0 + 0.05)
    assert exchange_s(Op.PAIR, 3e6, links, 5) == pytest.approx(3.0 + 0.05)
    assert exchange_s(Op.MEAN, 3e6, Links(upload=2e6, download=1e6, round_trip_s=0.0), 2) == pytest.approx(3.0)
    assert [sent_nbytes(op, 8.0, 4) for op in Op] == [12.0, 24.0, 8.0]


@pytest.mark.parametrize(
    ("method", "settings", "megabytes"),
    [
        ("data_parallel", {}, 3500),
        ("diloco", {"inner_steps": 30, "codec": "raw"}, 233),
        ("diloco", {"inner_steps": 500}, 14),
        ("diloco", {"inner_steps": 100}, 17.5),
        ("streaming", {"inner_steps": 100, "codec": "e3m0"}, 8.75),
        ("sparseloco", {}, 6.4),
        ("desloc", {}, 41),
        ("local_adam", {}, 82),
        ("noloco", {}, 80),
    ],
)
def test_bytes_are_those_of_the_published_comparison(method, settings, megabytes):
    """10^9 parameters, 8 peers; within 8%, since scales and indices travel too."""
    candidate = found(recommend(FAST, BILLION, 8), method, **settings)
    assert candidate.nbytes_a_step / 1e6 == pytest.approx(megabytes, rel=0.08)


def test_data_parallel_sends_the_parameters_every_50_steps_beside_its_gradients():
    candidate = found(recommend(FAST, BILLION, 8), "data_parallel")
    assert candidate.nbytes_a_step == pytest.approx(sent_nbytes(Op.MEAN, 2e9 + 4e9 / 50, 8))


def test_it_is_hidden_if_the_workers_never_wait():
    for candidate in recommend(FAST, BILLION, 8).candidates:
        compute_s = candidate.inner_steps * BILLION.inner_step_s
        assert candidate.utilisation == pytest.approx(compute_s / (compute_s + candidate.stall_s))
        assert candidate.is_hidden == (candidate.utilisation == 1.0)
        if candidate.delay == 0:
            assert not candidate.is_hidden
            assert candidate.stall_s >= candidate.exchange_s
        if candidate.is_hidden:
            assert candidate.exchange_s <= candidate.delay * BILLION.inner_step_s
            assert candidate.nbytes_a_step / FAST.upload <= BILLION.inner_step_s


def test_exchanges_that_are_short_but_too_many_are_not_hidden():
    """Decoupled: each of 24 fragments is there in time, but all of them are too much for the link."""
    candidate = found(recommend(FAST, BILLION, 8), "decoupled")
    assert candidate.exchange_s < candidate.delay * BILLION.inner_step_s
    assert candidate.stall_s == pytest.approx(2 * 1e9 * 1.75 / 125e6 - 24)


def test_one_peer_exchanges_nothing():
    recommendation = recommend(FAST, BILLION, 1)
    assert all(c.exchange_s == c.nbytes_a_step == 0.0 and c.is_hidden for c in recommendation.candidates)


@pytest.mark.parametrize("num_layers", [1, 3, 4, 24, 1000])
def test_fragments_have_three_layers_and_each_has_its_turn(num_layers):
    for candidate in recommend(FAST, dataclasses.replace(BILLION, num_layers=num_layers), 8).candidates:
        if candidate.method == "streaming":
            assert candidate.num_fragments == min(math.ceil(num_layers / 3), candidate.inner_steps)
            assert 1 <= candidate.delay <= MAX_DELAY < candidate.inner_steps


# ------------------------------------------------------------------------------------------------ the policy


def test_by_default_fragments_stream_at_int8():
    pick = recommend(FAST, BILLION, 8).pick
    assert (pick.method, pick.inner_steps, pick.codec, pick.delay) == ("streaming", 30, "int8", 2)
    assert pick.is_hidden


@pytest.mark.parametrize(
    ("step_s", "inner_steps", "codec", "is_hidden"),
    [
        (1.0, 30, "int8", True),
        (0.3, 30, "e3m0", True),
        (0.15, 100, "int8", True),
        (0.1, 100, "e3m0", True),
    ],
)
def test_where_bandwidth_binds_fewer_bits_come_before_rarer_exchanges(step_s, inner_steps, codec, is_hidden):
    pick = recommend(FAST, dataclasses.replace(BILLION, inner_step_s=step_s, num_layers=96), 8).pick
    assert (pick.method, pick.inner_steps, pick.codec, pick.is_hidden) == ("streaming", inner_steps, codec, is_hidden)


@pytest.mark.parametrize("rate", [0.1, 1, 10, 30, 100, 300, 1000, 10_000])
def test_payloads_are_sparse_where_no_streaming_is_hidden_and_they_make_the_workers_wait_less(rate):
    recommendation = recommend(megabits(rate), BILLION, 8)
    (sparse,) = (c for c in recommendation.candidates if c.method == "sparseloco")
    streaming = [c for c in recommendation.candidates if c.method == "streaming"]
    is_sparse = not any(c.is_hidden for c in streaming) and sparse.utilisation > streaming[-1].utilisation
    assert recommendation.pick.method == ("sparseloco" if is_sparse else "streaming")


def test_slow_links_are_sparse_and_fast_ones_stream():
    assert recommend(megabits(1), BILLION, 8).pick.method == "sparseloco"
    assert recommend(megabits(10_000), BILLION, 8).pick.method == "streaming"


@pytest.mark.parametrize("name", ["upload", "download"])
def test_either_direction_can_be_the_slow_one(name):
    links = dataclasses.replace(FAST, **{name: 1e5})
    assert recommend(links, BILLION, 8).pick.method == "sparseloco"


def test_among_many_peers_a_mean_of_four_bits_waits_less_than_sparse_payloads_for_everybody():
    assert [recommend(megabits(1), BILLION, peers).pick.method for peers in (8, 200)] == ["sparseloco", "streaming"]


def test_equal_inputs_give_equal_recommendations():
    assert recommend(FAST, BILLION, 8) == recommend(dataclasses.replace(FAST), dataclasses.replace(BILLION), 8)


def test_what_is_avoided_is_never_chosen():
    for rate in (1, 100, 1000, 1e5):
        for peers in (1, 2, 8, 60):
            pick = recommend(megabits(rate), BILLION, peers).pick
            assert pick.method not in {"qsr", "delayed", "data_parallel"}


# ------------------------------------------------------------------------------------------------ published losses


@pytest.mark.parametrize(
    ("size", "peers", "setting", "measured_peers", "loss"),
    [
        (1.2e9, 8, "1.3B", 8, 2.493 - 2.460),
        (1.2e9, 2, "1.3B", 2, 2.464 - 2.460),
        (40e6, 100, "35M", 8, 3.621 - 3.485),
        (70e9, 8, "10B", 4, 2.096 - 2.090),
        (600e6, 3, "550M", 2, 2.657 - 2.653),
    ],
)
def test_dilocos_loss_is_the_nearest_published(size, peers, setting, measured_peers, loss):
    model = dataclasses.replace(BILLION, num_parameters=int(size))
    penalty = found(recommend(FAST, model, peers), "diloco", inner_steps=30, codec="raw").penalty
    assert (penalty.setting, penalty.peers) == (setting, measured_peers)
    assert penalty.loss == pytest.approx(loss, abs=1e-9)
    assert (penalty.source, penalty.evidence) == ("2503.09799", "T")


def test_figures_name_their_source_and_what_is_unknown_says_so():
    recommendation = recommend(megabits(1), BILLION, 8)
    for candidate in recommendation.candidates:
        penalty = candidate.penalty
        assert penalty.setting
        assert penalty.evidence in {"T", "S", ""}
        if candidate.method != "data_parallel" and penalty.loss is not None:
            assert penalty.source
            assert penalty.evidence
    unknown = {candidate.method for candidate in recommendation.candidates if candidate.penalty.loss is None}
    assert {"sparseloco", "desloc", "local_adam", "noloco", "decoupled"} <= unknown


# ------------------------------------------------------------------------------------------------ names


def test_methods_are_known_by_their_registered_names():
    assert {candidate.method for candidate in recommend(FAST, BILLION, 8).candidates} <= set(outer_types())


def test_wire_sizes_are_those_of_the_codecs():
    codec_named = pytest.importorskip("isthmus.collective.codec").codec_named
    for name, nbytes in CODEC_NBYTES.items():
        assert codec_named(name).wire_nbytes(1 << 20) / (1 << 20) == pytest.approx(nbytes, rel=2e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Links(upload=0.0, download=1.0, round_trip_s=0.0),
        lambda: Links(upload=1.0, download=math.nan, round_trip_s=0.0),
        lambda: Links(upload=1.0, download=1.0, round_trip_s=-0.1),
        lambda: Links(upload=1.0, download=1.0, round_trip_s=math.inf),
        lambda: Model(num_parameters=0, inner_step_s=1.0, num_layers=1),
        lambda: Model(num_parameters=1, inner_step_s=0.0, num_layers=1),
        lambda: Model(num_parameters=1, inner_step_s=math.nan, num_layers=1),
        lambda: Model(num_parameters=1, inner_step_s=1.0, num_layers=0),
        lambda: recommend(FAST, BILLION, 0),
    ],
)
def test_inputs_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"must be"):
        make()

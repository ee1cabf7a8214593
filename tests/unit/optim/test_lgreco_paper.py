# SPDX-License-Identifier: Apache-2.0
"""L-GreCo (arXiv:2210.17357): minimise Σ nbytes(c) subject to Σ error(c)² <= that of one reference for all layers."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim import DiLoCo, FragmentKey, RunFacts
from isthmus.optim.async_diloco import AsyncDiLoCo
from isthmus.optim.data_parallel import DataParallel
from isthmus.optim.decoupled import DecoupledDiLoCo
from isthmus.optim.eager import Eager
from isthmus.optim.edit import EDiT
from isthmus.optim.lgreco import Cost, choose, with_codecs
from isthmus.optim.outer import digest_of
from isthmus.optim.qsr import QSR
from isthmus.optim.streaming import Streaming
from tests.unit.optim.lab import INITIAL, TABLE, anchors, assert_parity, assert_same, run

CODECS = ("raw", "bf16", "int8", "e3m0", "twobit")
COSTS = st.one_of(
    st.builds(Cost, nbytes=st.floats(0.0, 1e3), squared_error=st.floats(0.0, 1e3)),
    st.builds(Cost, nbytes=st.integers(0, 9).map(float), squared_error=st.integers(0, 9).map(lambda n: n / 10.0)),
)


def total(costs, chosen, what):
    """In the order of the layers, one addition after another."""
    result = 0.0
    for layer, choices in costs.items():
        result += getattr(choices[chosen[layer]], what)
    return result


def uniform(costs, reference):
    return dict.fromkeys(costs, reference)


def brute_force(costs, reference):
    """The fewest bytes of all assignments that keep to the reference's error."""
    budget = total(costs, uniform(costs, reference), "squared_error")
    assignments = (dict(zip(costs, choice, strict=True)) for choice in itertools.product(*costs.values()))
    return min(total(costs, a, "nbytes") for a in assignments if total(costs, a, "squared_error") <= budget)


def a_model(num_layers, seed):
    """Layers of many sizes and scales, with codecs whose error falls by 4 a bit, each a little different."""
    rng = random.Random(seed)
    costs = {}
    for number in range(num_layers):
        numel, scale = rng.choice((1e3, 4e3, 1.6e4)), rng.lognormvariate(0.0, 4.0)
        costs[f"layer{number}"] = {
            name: Cost(nbytes=numel * bits / 8.0, squared_error=numel * scale * 4.0**-bits * rng.uniform(0.5, 2.0))
            for name, bits in zip(CODECS, (32, 16, 8, 4, 2), strict=True)
        }
    return costs


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(COSTS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_it_finds_the_optimum_of_small_cases(rows):
    costs = {number: dict(zip("abc", row, strict=True)) for number, row in enumerate(rows)}
    chosen = choose(costs, "b")
    assert total(costs, chosen, "nbytes") == brute_force(costs, "b")


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(COSTS, min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(1, 12),
)
def test_it_never_loses_or_sends_more_than_the_reference_however_coarse(rows, num_bins):
    costs = {number: dict(zip("abc", row, strict=True)) for number, row in enumerate(rows)}
    chosen = choose(costs, "b", num_bins=num_bins)
    assert list(chosen) == list(costs)
    for what in ("squared_error", "nbytes"):
        assert total(costs, chosen, what) <= total(costs, uniform(costs, "b"), what)


@pytest.mark.parametrize("reference", CODECS)
@pytest.mark.parametrize("num_bins", [5, 300])
def test_it_never_loses_more_than_the_reference_on_a_large_model(reference, num_bins):
    costs = a_model(40, seed=3)
    chosen = choose(costs, reference, num_bins=num_bins)
    assert total(costs, chosen, "squared_error") <= total(costs, uniform(costs, reference), "squared_error")


def test_layers_that_differ_send_less_and_finer_bins_less_still():
    costs = a_model(40, seed=4)
    sent = [total(costs, choose(costs, "int8", num_bins=bins), "nbytes") for bins in (3, 30, 300)]
    assert sent[0] >= sent[1] >= sent[2]
    assert sent[0] < 0.7 * total(costs, uniform(costs, "int8"), "nbytes")
    assert sent[2] < 0.6 * total(costs, uniform(costs, "int8"), "nbytes")


@pytest.mark.parametrize("num_bins", [4, 6, 10, 50])
def test_bins_are_not_wasted_on_what_the_other_layers_cannot_make_good(num_bins):
    """Every choice of every layer loses something, so most of the error is never there to be shared out."""

    def layer(scale):
        errors = {"a": (30.0, 10.0), "b": (20.0, 14.0), "c": (10.0, 22.0)}
        return {name: Cost(nbytes=nbytes, squared_error=scale * error) for name, (nbytes, error) in errors.items()}

    costs = {number: layer((1.0, 8.0)[number % 2]) for number in range(20)}
    assert total(costs, uniform(costs, "b"), "nbytes") == 400.0
    assert total(costs, choose(costs, "b"), "nbytes") == 330.0
    assert total(costs, choose(costs, "b", num_bins=num_bins), "nbytes") <= 350.0


def test_errors_that_can_all_be_kept_are_not_binned():
    """Of 0 and 1e-9 a bin would keep the cheaper, which leaves the second layer too little."""
    first = {
        "a": Cost(nbytes=10.0, squared_error=0.0),
        "b": Cost(nbytes=9.0, squared_error=1e-9),
        "c": Cost(nbytes=1.0, squared_error=1.0),
    }
    second = {
        "a": Cost(nbytes=100.0, squared_error=1.0),
        "b": Cost(nbytes=50.0, squared_error=1.0),
        "c": Cost(nbytes=1000.0, squared_error=0.0),
    }
    assert choose({1: first, 2: second}, "a") == {1: "a", 2: "b"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_layers_with_unlike_errors_changes_nothing(order):
    def layer(scale):
        errors = {"a": (9.0, 1.0), "b": (5.0, 2.0), "c": (2.0, 5.0)}
        return {name: Cost(nbytes=nbytes, squared_error=scale * error) for name, (nbytes, error) in errors.items()}

    layers = [layer(scale) for scale in (0.1, 1.0, 100.0)]
    costs = {number: layers[number] for number in order}
    chosen = choose(costs, "b")
    assert chosen == {0: "c", 1: "c", 2: "a"}
    assert list(chosen) == list(order)


def test_no_error_above_the_references_is_forgiven():
    for excess in (1e-2, 1e-9, 1e-15):
        layer = {"cheap": Cost(nbytes=1.0, squared_error=1.0 + excess), "dear": Cost(nbytes=9.0, squared_error=1.0)}
        assert choose({"one": layer}, "dear") == {"one": "dear"}
        assert choose({"one": layer, "two": layer}, "dear") == {"one": "dear", "two": "dear"}


@pytest.mark.parametrize("num_layers", [1, 7, 50])
@pytest.mark.parametrize("reference", ["int8", "e3m0"])
def test_equal_layers_get_the_reference(num_layers, reference):
    """Each bit more helps less than the one before, as with quantisation: then no mixture beats the uniform choice."""
    choices = {
        name: Cost(nbytes=bits, squared_error=4.0**-bits) for name, bits in zip(CODECS, (32, 16, 8, 4, 2), strict=True)
    }
    costs = dict.fromkeys(range(num_layers), choices)
    assert choose(costs, reference, num_bins=100) == uniform(costs, reference)


def test_equal_layers_are_mixed_where_that_sends_less():
    """Two layers: 0 and 10 bytes against twice 8, at less error."""
    choices = {
        "all": Cost(nbytes=10.0, squared_error=0.0),
        "half": Cost(nbytes=8.0, squared_error=6.0),
        "none": Cost(nbytes=0.0, squared_error=11.0),
    }
    assert sorted(choose({1: choices, 2: choices}, "half").values()) == ["all", "none"]


def test_a_reference_without_error_is_beaten_by_its_equals_only():
    costs = {
        "zero": {"raw": Cost(nbytes=4.0, squared_error=0.0), "int8": Cost(nbytes=1.0, squared_error=0.0)},
        "other": {"raw": Cost(nbytes=4.0, squared_error=0.0), "int8": Cost(nbytes=1.0, squared_error=1e-30)},
    }
    assert choose(costs, "raw") == {"zero": "int8", "other": "raw"}


def test_of_equal_costs_the_reference_is_taken():
    same = Cost(nbytes=4.0, squared_error=1.0)
    assert choose({1: {"a": same, "b": same}}, "b") == {1: "b"}


def test_ranks_can_be_chosen_and_layers_need_not_have_the_same():
    """PowerSGD: the error is what the singular values beyond the rank hold."""
    generator = torch.Generator().manual_seed(0)
    costs = {}
    for name, size, decay, ranks in (("flat", 6, 1.0, (1, 2, 4, 5)), ("steep", 12, 0.2, (1, 2, 3, 4, 8))):
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
        energy = torch.linalg.svdvals(basis * decay ** torch.arange(float(size))) ** 2
        costs[name] = {r: Cost(nbytes=4.0 * r * 2 * size, squared_error=float(energy[r:].sum())) for r in ranks}
    chosen = choose(costs, 4)
    assert chosen == {"flat": 5, "steep": 1}
    assert total(costs, chosen, "nbytes") == brute_force(costs, 4)


def test_no_layers_need_no_choice():
    assert choose({}, "int8") == {}


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["nbytes", "squared_error"])
def test_costs_that_are_no_costs_are_refused(name, bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        Cost(**{"nbytes": 1.0, "squared_error": 1.0, name: bad})


def test_a_reference_that_a_layer_cannot_choose_is_refused():
    costs = {"one": {"int8": Cost(nbytes=1.0, squared_error=1.0)}}
    with pytest.raises(ValueError, match="'one' cannot choose the reference 'e3m0'"):
        choose(costs, "e3m0")
    with pytest.raises(ValueError, match="num_bins"):
        choose(costs, "int8", num_bins=0)


# ------------------------------------------------------------------------------------------------ the rounds' codecs

WHOLE = FragmentKey(kind="param", index=0)


class TwoHalves(DiLoCo):
    """DiLoCo whose two halves take turns; the second asks for a codec itself."""

    def fragments(self, table):
        names = [spec.name for spec in table.specs]
        return tuple(table.fragment(p, names[p::2]) for p in range(2))

    def plan(self, inner_step):
        from isthmus.optim import Op, Round

        half, rest = divmod(inner_step, self.inner_steps)
        if rest or not half:
            return ()
        key = FragmentKey(kind="param", index=half % 2)
        return (Round(fragment=key, op=Op.MEAN, inner_step=inner_step, codec="topk:64" if half % 2 else None),)


def test_rounds_get_the_codecs_of_their_fragments_and_nothing_else_changes():
    base = TwoHalves(inner_steps=4)
    outer = with_codecs(base, {WHOLE: "int8"})
    assert [round_.codec for step in range(13) for round_ in outer.plan(step)] == ["topk:64", "int8", "topk:64"]
    assert [round_.codec for step in range(13) for round_ in base.plan(step)] == ["topk:64", None, "topk:64"]
    both = with_codecs(base, {WHOLE: "int8", FragmentKey(kind="param", index=1): "e3m0"})
    assert [round_.codec for step in range(13) for round_ in both.plan(step)] == ["e3m0", "int8", "e3m0"]
    churn = {"joins": {9: ["elm"]}, "leaves": {14: ["birch"]}, "aborted": lambda round_: round_.inner_step == 12}
    plain, wrapped = run(base, 32, **churn), run(outer, 32, **churn)
    assert_same(anchors(wrapped), anchors(plain), tolerance=0.0)
    assert_parity(wrapped)
    assert {committed.round_.codec for committed in wrapped.committed} == {"int8", "topk:64"}


def test_the_wrapped_methods_state_is_its_own():
    base = DiLoCo(inner_steps=4)
    outer = with_codecs(base, {WHOLE: "int8"})
    (fragment,) = outer.fragments(TABLE)
    assert digest_of(outer.init(fragment, INITIAL)) == digest_of(base.init(fragment, INITIAL))


@pytest.mark.parametrize(
    "base",
    [Streaming(inner_steps=6), EDiT(inner_steps=6), DecoupledDiLoCo(inner_steps=6), Eager(inner_steps=6), QSR()],
    ids=lambda base: type(base).__name__,
)
def test_any_method_can_be_wrapped_and_is_fitted_like_itself(base):
    """What it fits to the model or the run, its private state and how its workers settle are its own."""
    run_facts = RunFacts(num_peers=4, outer_steps=9, peak_lr=0.01, schedule="cosine")
    codecs = {WHOLE: "int8"}
    outer = with_codecs(base, codecs).fitted(TABLE, run_facts)
    fitted = base.fitted(TABLE, run_facts)
    assert outer.fragments(TABLE) == fitted.fragments(TABLE)
    for step in range(13):
        wrapped, plain = outer.plan(step), fitted.plan(step)
        assert [round_.codec for round_ in wrapped] == [codecs.get(round_.fragment) for round_ in plain]
        assert [dataclasses.replace(round_, codec=None) for round_ in wrapped] == list(plain)
    churn = {"joins": {9: ["elm"]}, "leaves": {14: ["birch"]}, "aborted": lambda round_: round_.inner_step == 12}
    plain, wrapped = run(fitted, 24, **churn), run(outer, 24, **churn)
    assert_same(anchors(wrapped), anchors(plain), tolerance=0.0)
    assert_same(list(wrapped.values.values()), list(plain.values.values()), tolerance=0.0)


@pytest.mark.parametrize("base", [DiLoCo(), DataParallel(), AsyncDiLoCo()], ids=lambda base: type(base).__name__)
def test_what_a_wrapped_method_says_of_itself_is_its_own_word(base):
    """Found before: gradients in codecs of their own let a slow worker leave steps out, which it cannot."""
    outer = with_codecs(base, {})
    for name in ("counts_from_anchor", "steps_may_differ", "reads_payloads"):
        assert getattr(outer, name) is getattr(base, name)


def test_the_codecs_given_are_copied():
    codecs = {WHOLE: "int8"}
    outer = with_codecs(DiLoCo(inner_steps=4), codecs)
    codecs[WHOLE] = "raw"
    assert outer.plan(4)[0].codec == "int8"


def test_a_codec_for_a_fragment_that_does_not_exist_is_refused():
    outer = with_codecs(DiLoCo(), {FragmentKey(kind="param", index=3): "int8"})
    with pytest.raises(ValueError, match="no fragment"):
        outer.fragments(TABLE)

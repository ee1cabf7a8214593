# SPDX-License-Identifier: Apache-2.0
"""`[outer] guard` and `error_feedback`: what of a method they make, when, and what an operator is told."""

import pytest

from isthmus.optim.error_feedback import ErrorFeedback
from isthmus.optim.outer import Outer
from isthmus.optim.robust import Robust
from isthmus.optim.wrapper import Wrapper
from isthmus.trainer.config.outer_method import method_of
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.errors import ConfigError

Flags = dict[str, str]


def outer_of(**settings: str) -> Outer:
    """The run's method with these keys of `[outer]`."""
    flags = [Override(f"outer.{key}", text, f"--outer.{key}") for key, text in settings.items()]
    return method_of(load_config(overrides=flags).config).outer


def layers(outer: Outer) -> list[type[Outer]]:
    """The wrappers, from outside."""
    found: list[type[Outer]] = []
    while isinstance(outer, Wrapper):
        found.append(type(outer))
        outer = outer.outer
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"codec": "twobit"}, []),
        ({"codec": "twobit", "type": "streaming", "error_feedback": "true"}, [ErrorFeedback]),
        ({"codec": "int8", "error_feedback": "true"}, [ErrorFeedback]),
        ({"guard": "trimmed"}, [Robust]),
        ({"guard": "centred", "codec": "twobit", "error_feedback": "true"}, [Robust, ErrorFeedback]),
    ],
)
def test_a_method_is_wrapped_as_the_keys_say(settings: Flags, expected: list[type[Outer]]) -> None:
    assert layers(outer_of(**settings)) == expected


@pytest.mark.parametrize("guard", ["norm", "trimmed", "centred"])
def test_the_guard_is_the_one_that_is_named(guard: str) -> None:
    outer = outer_of(guard=guard)
    assert isinstance(outer, Robust)
    assert outer.guard == guard


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (
            {"type": "powersgd", "error_feedback": "true"},
            "error_feedback",
            "it has a residual of its own; leave it out",
        ),
        ({"type": "async", "error_feedback": "true"}, "error_feedback", "its rounds are no means; leave it out"),
        ({"type": "desloc", "guard": "norm"}, "guard", 'it averages exp_avg, exp_avg_sq too, .* take guard = "none"'),
        ({"type": "sparseloco", "guard": "trimmed"}, "guard", 'takes every payload; take guard = "norm"'),
        ({"type": "powersgd", "guard": "centred"}, "guard", 'take guard = "trimmed"'),
    ],
)
def test_what_does_not_fit_is_told_with_its_key_and_cure(settings: Flags, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        outer_of(**settings)
    assert told.value.key == f"outer.{key}"


def test_a_guard_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="expected 'none', 'norm', 'trimmed' or 'centred'; did you mean centred"):
        outer_of(guard="centered")

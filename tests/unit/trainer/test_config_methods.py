# SPDX-License-Identifier: Apache-2.0
"""What a run can be told of its method is what the method's dataclass says."""

import dataclasses
import typing
from pathlib import Path

import pytest
from pydantic import ValidationError

from isthmus.collective.codec import codec_names
from isthmus.optim import registry
from isthmus.trainer.config.keys import KNOWN_KEYS
from isthmus.trainer.config.methods import methods, methods_in
from isthmus.trainer.config.outer import OuterSection, outer_section
from isthmus.trainer.errors import ConfigError

HEAD = '''\
"""A method: what its first line says.

More of it.
"""
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal
from isthmus.optim.registry import register
'''


def write(folder: Path, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(HEAD + body)


def settings_of(folder: Path, method: str) -> dict[str, object]:
    return {setting.name: setting.default for setting in methods_in(folder)[method].settings}


@pytest.mark.parametrize("method", registry.outer_types())
def test_the_settings_of_a_method_are_the_fields_of_its_dataclass(method: str) -> None:
    cls = registry._registered[method]
    fields = [one for one in dataclasses.fields(cls) if one.init and not one.metadata.get("fitted")]
    defaults = [(one.name, ... if one.default is dataclasses.MISSING else one.default) for one in fields]
    assert [(setting.name, setting.default) for setting in methods()[method].settings] == defaults
    assert all(setting.meaning.endswith(".") for setting in methods()[method].settings)
    assert methods()[method].meaning.endswith(".")


def test_every_method_can_be_named_and_each_of_its_settings_is_a_key() -> None:
    assert list(methods()) == list(registry.outer_types())
    for method, told in methods().items():
        assert all(method in KNOWN_KEYS[f"outer.{setting.name}"]["outer"] for setting in told.settings)
    assert KNOWN_KEYS["outer.type"] == KNOWN_KEYS["outer.codec"] == {"outer": frozenset(methods())}


@pytest.mark.parametrize("method", registry.outer_types())
def test_a_section_without_anything_said_builds_the_method_with_its_defaults(method: str) -> None:
    settings = outer_section(method)(type=method).settings()
    assert registry.build_outer(method, **settings) == registry.build_outer(method)


def test_a_run_can_name_every_codec_but_those_that_are_a_methods_own() -> None:
    named = typing.get_args(OuterSection.model_fields["codec"].annotation)
    assert set(named) == set(codec_names()) - {"topk"}


def test_what_a_worked_out_setting_is_called_is_no_key() -> None:
    assert "outer.shapes" not in KNOWN_KEYS
    assert "outer.guards" not in KNOWN_KEYS


def test_a_method_has_the_settings_of_its_base_in_the_order_of_a_dataclass(tmp_path: Path) -> None:
    base = '''
LIMIT = 7
Mode = Literal["a", "b"]
@dataclass(frozen=True)
class Base:
    first: int = LIMIT
    """Of the base."""
    second: Mode = "a"
    """Of the base, too."""
    hidden: ClassVar[int] = 3
    def between(self) -> int:
        return 1
    third: float | None = None
    """Behind a method; None: not."""
'''
    derived = '''
from isthmus.optim.base import Base
@register("derived")
@dataclass(frozen=True)
class Derived(Base):
    second: Mode = "b"
    """Replaced."""
    _: KW_ONLY
    fourth: tuple[str, ...] = ("x",)
    """Its own."""
    worked_out: object = field(init=False)
    third: float | None = field(default=1.0, metadata={"fitted": True})
    """No key any more."""
    fifth: bool
    """Needed."""
'''
    write(tmp_path, "base", base)
    write(tmp_path, "derived", derived.replace("import Base", "import Base, Mode"))
    method = methods_in(tmp_path)["derived"]
    assert method.meaning == "A method: what its first line says."
    assert [(one.name, one.default, one.meaning) for one in method.settings] == [
        ("first", 7, "Of the base."),
        ("second", "b", "Replaced."),
        ("fourth", ("x",), "Its own."),
        ("fifth", ..., "Needed."),
    ]


def test_the_words_for_values_are_those_of_toml(tmp_path: Path) -> None:
    write(tmp_path, "a", '@register("a")\n@dataclass\nclass A:\n    x: int | None = None\n    """None: no; True."""\n')
    assert methods_in(tmp_path)["a"].settings[0].meaning == "none: no; true."


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ('x: dict[str, int] = {}\n    """X."""', r"line 11: a setting cannot be of type dict\[str, int\]"),
        ('x: "list" = 1\n    """X."""', "line 11: a setting cannot be of type 'list'"),
        ('x: float = float("inf")\n    """X."""', r"line 11: float\('inf'\) is not a literal"),
        ("x: int = 1", "line 11: nothing says what the setting x means"),
        ('type: int = 1\n    """X."""', "line 11: a setting cannot be called type"),
        ("x: int = = 1", "line 11: invalid syntax"),
    ],
)
def test_a_field_that_cannot_be_a_key_is_told_with_its_file_and_line(tmp_path: Path, field: str, problem: str) -> None:
    write(tmp_path, "odd", f'@register("odd")\n@dataclass\nclass Odd:\n    {field}\n')
    with pytest.raises(ConfigError, match=rf"odd\.py, {problem}"):
        methods_in(tmp_path)


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"inner_steps": 1.5}, "int_type"),
        ({"inner_steps": True}, "int_type"),
        ({"pattern": "zigzag"}, "literal_error"),
        ({"delay": 10**30}, "less_than_equal"),
        ({"keep": "half"}, "float_type"),
        ({"rank": 3}, "extra_forbidden"),
    ],
)
def test_a_value_of_another_type_is_refused(told: dict[str, object], kind: str) -> None:
    with pytest.raises(ValidationError) as caught:
        outer_section("streaming").model_validate({"type": "streaming"} | told)
    assert caught.value.errors()[0]["type"] == kind

# SPDX-License-Identifier: Apache-2.0
"""The method that optim/README.md teaches works as printed."""

import re
import sys
from pathlib import Path

import pytest
import torch

from isthmus import optim
from isthmus.optim import ANCHOR, DiLoCo, FragmentTable, build_outer, registry
from isthmus.optim.simulate import simulate
from isthmus.optim.workload import OneByOne

TABLE = FragmentTable.from_named_shapes([("w", (5, 2))])


def step(worker, inner_step, value):
    value -= 0.1 * (value - torch.arange(10.0) * ord(worker[0]) / 100.0 + inner_step)


def code_blocks():
    """Of the README, in order: how to choose a method, and how to write one."""
    text = (Path(optim.__path__[0]) / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_what_the_readme_says_of_choosing_runs():
    names = {}
    exec(code_blocks()[0], names)
    assert names["outer"].lr is None
    assert names["advice"].pick.is_hidden


@pytest.fixture
def tutorial(monkeypatch, tmp_path):
    """The README's text as one more file of the package, which the registry must find by itself."""
    _, code = code_blocks()
    (tmp_path / "readme_tutorial.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(optim, "__path__", [*optim.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._import_methods.cache_clear()
    yield
    registry._import_methods.cache_clear()
    sys.modules.pop("isthmus.optim.readme_tutorial", None)
    vars(optim).pop("readme_tutorial", None)


@pytest.mark.usefixtures("tutorial")
def test_the_tutorials_method_is_diloco_with_lr_one_and_no_momentum():
    runs = [
        simulate(
            outer,
            table=TABLE,
            initial=torch.linspace(0.0, 1.0, 10),
            workers=("ash", "birch", "cedar"),
            workload=OneByOne(step, rows=3, numel=10),
            num_inner_steps=12,
            aborted=lambda round_: round_.inner_step == 6,
        )
        for outer in (build_outer("average", inner_steps=3), DiLoCo(lr=1.0, momentum=0.0, inner_steps=3))
    ]
    assert len(runs[0].committed) == len(runs[1].committed) == 3
    for average, diloco in zip(runs[0].committed, runs[1].committed, strict=True):
        torch.testing.assert_close(average.shared[ANCHOR], diloco.shared[ANCHOR])


@pytest.mark.usefixtures("tutorial")
def test_the_tutorials_method_is_found_by_name_and_checked():
    assert "average" in registry.outer_types()
    with pytest.raises(ValueError, match="at least 1"):
        build_outer("average", inner_steps=0)

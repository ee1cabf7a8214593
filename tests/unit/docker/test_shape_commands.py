# SPDX-License-Identifier: Apache-2.0
"""What docker/shape.py reads, builds and understands; nothing here touches an interface."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SHAPE_PY = Path(__file__).resolve().parents[3] / "docker" / "shape.py"


def load_shape() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docker_shape", SHAPE_PY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


shape = load_shape()

# Read from iproute2 6.1 on a Linux 6.1 that has both.
IN_FORCE_JSON = json.dumps(
    [
        {
            "kind": "netem",
            "handle": "1:",
            "root": True,
            "options": {
                "limit": 100000,
                "delay": {"delay": 0.04, "jitter": 0.005, "correlation": 0},
                "loss-random": {"loss": 0.001, "correlation": 0},
                "ecn": False,
                "gap": 0,
            },
        },
        {
            "kind": "tbf",
            "handle": "10:",
            "parent": "1:1",
            "options": {"rate": 1250000, "burst": 10000, "burst_raw": "1e848", "lat": 73920, "limit": 102400},
        },
    ]
)
FULL = shape.Shape(delay_ms=40, jitter_ms=5, loss_percent=0.1, rate_mbit=10, queue_kb=100)


def command_lines(link: object, interface: str) -> list[str]:
    return [shlex.join(command) for command in shape.commands(link, interface)]


def test_full_shape_puts_the_bottleneck_inside_the_delay() -> None:
    assert command_lines(FULL, "eth7") == [
        "tc qdisc add dev eth7 root handle 1: netem limit 100000 delay 40000us 5000us loss 0.1000%",
        "tc qdisc add dev eth7 parent 1:1 handle 10: tbf rate 10000000bit burst 10000b limit 102400b",
        "ip link set dev eth7 gso_max_segs 1",
    ]


def test_rate_alone_takes_the_root_and_a_bucket_of_four_milliseconds() -> None:
    tbf, _ = command_lines(shape.Shape(rate_mbit=100, queue_kb=64), "eth0")
    assert tbf == "tc qdisc add dev eth0 root handle 1: tbf rate 100000000bit burst 50000b limit 65536b"


def test_loss_alone_needs_no_delay() -> None:
    netem, _ = command_lines(shape.Shape(loss_percent=2), "eth0")
    assert netem == "tc qdisc add dev eth0 root handle 1: netem limit 100000 loss 2.0000%"


def test_link_that_shapes_nothing_needs_no_command() -> None:
    assert command_lines(shape.Shape(), "eth0") == []


def test_what_the_kernel_reports_reads_back_as_what_was_asked() -> None:
    found = shape.parse_in_force(IN_FORCE_JSON)
    assert shape.differences(FULL, found) == []


@pytest.mark.parametrize("field", ["delay_ms", "jitter_ms", "loss_percent", "rate_mbit", "queue_kb"])
def test_each_field_that_is_not_in_force_is_named(field: str) -> None:
    missing = shape.dataclasses.replace(shape.parse_in_force(IN_FORCE_JSON), **{field: 0})
    (difference,) = shape.differences(FULL, missing)
    assert difference.startswith(f"{field} is 0 instead of ")


def test_qdiscs_of_the_kernel_itself_shape_nothing() -> None:
    assert shape.parse_in_force('[{"kind": "noqueue", "handle": "0:", "root": true}]') == shape.Shape()


def test_fields_bounds_and_qdiscs_speak_of_the_same_keys() -> None:
    names = [field.name for field in shape.dataclasses.fields(shape.Shape)]
    assert list(shape.BOUNDS) == names
    assert [name for group in shape.FIELDS.values() for name in group] == names


def test_shipped_scenario_shapes_every_link_fully() -> None:
    shapes = shape.read_scenario(SHAPE_PY.with_name("scenario.toml").read_text())
    assert len(shapes) == 3
    assert all(link.kinds() == ["netem", "tbf"] for link in shapes.values())


@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        ("[links.a]\ndelay = 3", r"unknown key 'delay' in \[links.a\]: did you mean 'delay_ms'\?"),
        ("[links.a]\nrat_mbit = 3", "did you mean 'rate_mbit'"),
        ("[links.a]\ncolour = 3", "known are delay_ms, jitter_ms, loss_percent, rate_mbit, queue_kb"),
        ("[link.a]\ndelay_ms = 3", "unknown key 'link' at the top of the scenario: did you mean 'links'"),
        ("", r"no link: add a table \[links.NAME\]"),
        ("[links]", r"no link: add a table \[links.NAME\]"),
        ("[links]\na = 3", r"\[links.a\] must be a table"),
        ("[links.a", "not valid TOML"),
        ('[links.a]\ndelay_ms = "3ms"', "delay_ms = '3ms' .* is not a number"),
        ("[links.a]\ndelay_ms = true", "is not a number"),
        ("[links.a]\ndelay_ms = -1", "out of range: give 0 or 0.001 to 60000"),
        ("[links.a]\ndelay_ms = nan", "out of range"),
        ("[links.a]\nloss_percent = 101", "out of range: give 0 or 0.0001 to 100"),
        ("[links.a]\nrate_mbit = inf\nqueue_kb = 10", "out of range"),
        ("[links.a]\ndelay_ms = 1\njitter_ms = 2", "jitter_ms exceeds delay_ms"),
        ("[links.a]\nrate_mbit = 10", "rate_mbit and queue_kb go together"),
        ("[links.a]\nqueue_kb = 10", "rate_mbit and queue_kb go together"),
        ("[links.a]\nrate_mbit = 10\nqueue_kb = 1", "queue_kb = 1 .* out of range"),
    ],
)
def test_mistake_in_the_scenario_is_named_with_its_cure_and_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str, complaint: str
) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(scenario)
    assert shape.main(["--scenario", str(path), "--link", "a", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(complaint, printed.err)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "complaint"),
    [
        (["--link", "peer-9", "--dry-run"], 2, "no link 'peer-9' in .*: did you mean 'peer-"),
        (["--link", "a", "--scenario", "/nowhere.toml"], 2, "cannot read the scenario .* --scenario"),
        (["--link", "peer-1", "--interface", "wan7"], 3, "no interface 'wan7' here: give --interface one of lo"),
    ],
)
def test_mistake_on_the_command_line_is_named_with_its_cure(
    capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int, complaint: str
) -> None:
    assert shape.main(arguments) == exit_code
    assert re.search(complaint, capsys.readouterr().err)


@pytest.mark.parametrize(("number", "link"), [(1, "peer-1"), (3, "peer-3"), (4, "peer-1"), (12, "peer-3")])
def test_links_are_given_out_in_turn_by_the_number_in_a_containers_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, link: str
) -> None:
    def answer(command: list[str]) -> subprocess.CompletedProcess[str]:
        told = {
            "ip": '[{"addr_info": [{"local": "172.18.0.9"}]}]',
            "getent": f"172.18.0.9  my-1-peer-{number}.my-1_wan",
        }
        return subprocess.CompletedProcess(command, 0, told[command[0]], "")

    monkeypatch.setattr(shape, "_run", answer)
    assert shape.main(["--link", "auto", "--dry-run"]) == 0
    by_number = capsys.readouterr().out
    assert shape.main(["--link", link, "--dry-run"]) == 0
    assert by_number == capsys.readouterr().out


def test_container_without_a_number_is_told_to_name_its_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shape, "NAME_TRIES", 1)
    assert shape.main(["--link", "auto", "--dry-run", "--interface", "lo"]) == 3
    assert "name a link of the scenario instead of auto" in capsys.readouterr().err


def test_shaping_without_root_exits_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shape.os, "geteuid", lambda: 10001)
    assert shape.main(["--link", "peer-1", "--interface", "lo"]) == 3
    assert "only root may shape" in capsys.readouterr().err


def test_dry_run_prints_commands_that_a_shell_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert shape.main(["--link", "peer-3", "--dry-run", "--interface", "eth3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tc", "tc", "ip"]
    assert all(" dev eth3 " in line for line in lines)

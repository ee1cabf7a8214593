# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds on this machine, and that it leaves the machine as it was."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from isthmus.trainer.cli import app as cli
from isthmus.trainer.doctor import machine
from isthmus.trainer.errors import ExitCode
from tests.unit.trainer.test_doctor_report import SCHEMA

NAMES = ["python", "device", "memory", "disk", "files", "bbr", "listen", "addresses"]


@pytest.fixture(autouse=True)
def short_look_at_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_WRITE_S", 0.1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_without_a_ticket_the_machine_alone_is_looked_at_and_nothing_is_made(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", "--json", "--device", "cpu"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    assert [check["name"] for check in document["checks"]] == NAMES
    assert document["ok"]
    assert list(here.iterdir()) == []


def test_one_failure_is_exit_code_3_and_the_rest_is_looked_at_all_the_same(
    here: Path, capsys: pytest.CaptureFixture[str], taken: int
) -> None:
    assert cli.run(["doctor", "--listen", f"127.0.0.1:{taken}", "--device", "cpu"]) == ExitCode.ENVIRONMENT
    lines = capsys.readouterr().out.splitlines()
    failed = [number for number, line in enumerate(lines) if line.startswith("✗")]
    assert [lines[number] for number in failed] == [f"✗ listen      127.0.0.1:{taken} is in use"]
    assert lines[failed[0] + 1].strip() == "stop the process that listens there, or choose another port with --listen"
    assert [line.split()[1] for line in lines if line[0] != " "] == NAMES[:-1]


def test_without_torch_the_doctor_still_says_so(here: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from isthmus.trainer.cli import app; sys.exit(app.run(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.ENVIRONMENT, "")
    (line, cure) = done.stdout.splitlines()
    assert line.startswith("✗ python      Python 3.")
    assert "torch cannot be loaded" in line
    assert cure.strip().startswith("install isthmus anew")


def test_what_is_no_ticket_is_a_finding_and_an_unknown_key_is_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", "--device", "cpu", "no ticket"]) == ExitCode.ENVIRONMENT
    assert "✗ ticket      this is not a ticket" in capsys.readouterr().out
    assert cli.run(["doctor", "--node.lisen", "*:0"]) == ExitCode.USAGE
    assert capsys.readouterr().out == ""


def test_gpus_that_are_wanted_and_not_there_fail_and_no_gpu_does_not() -> None:
    import torch

    wanted = torch.cuda.device_count() + 1
    check = machine.device("cuda", wanted)
    assert (check.level, check.facts["num_gpus"]) == ("fail", wanted - 1)
    assert "--device cpu" in str(check.cure)
    assert machine.device("cpu", wanted).level == "ok"


def test_a_folder_is_measured_where_it_would_be_made(tmp_path: Path) -> None:
    check = machine.disk(tmp_path / "runs" / "demo")
    assert check.facts["folder"] == str(tmp_path)
    assert isinstance(check.facts["write_bytes_per_s"], int)
    assert check.facts["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_folder_that_cannot_be_written_fails() -> None:
    check = machine.disk(Path("/proc/self/runs"))
    assert check.level == "fail"
    assert "--dir" in str(check.cure)


def test_few_open_files_are_a_warning_and_very_few_a_failure() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1024:
        pytest.skip("this process may not open as many as are enough")
    enough = 1024
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 64
    try:
        levels = []
        for limit in (enough, 1023, max(127, used + 16)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            levels.append((limit >= 128, machine.files().level))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert levels[:2] == [(True, "ok"), (True, "warn")]
    assert levels[2] in ((False, "fail"), (True, "warn"))


def test_a_free_port_is_listened_on_until_it_is_given_back() -> None:
    check, sock = machine.listening("127.0.0.1:0")
    assert sock is not None
    with sock:
        assert check.facts["port"] == sock.getsockname()[1]
        socket.create_connection(sock.getsockname(), timeout=5).close()
        again, nothing = machine.listening(f"127.0.0.1:{check.facts['port']}")
        assert (again.level, nothing) == ("fail", None)
    nowhere, nothing = machine.listening("192.0.2.200:7000")
    assert (nowhere.level, nothing) == ("fail", None)


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1:1", "loopback"),
        ("10.9.0.1:1", "private"),
        ("100.64.3.4:1", "provider's NAT"),
        ("8.8.8.8:1", "public"),
        ("[fd00:9::1]:1", "private IPv6"),
        ("[2600::1]:1", "public IPv6"),
        ("peer.example.org:1", "name"),
    ],
)
def test_addresses_are_told_by_their_kind(address: str, kind: str) -> None:
    assert machine.kind_of(address) == kind


def test_loopback_alone_is_a_warning_unless_it_was_asked_for() -> None:
    assert machine.addresses("127.0.0.1:7000", None, is_open=True).level == "warn"
    assert machine.addresses("127.0.0.1:7000", None, is_open=False).level == "ok"
    check = machine.addresses("me.example.org:7000,10.0.0.1:7000,127.0.0.1:7000", "me.example.org:7000", is_open=True)
    assert check.text == "me.example.org (advertised), 10.0.0.1 (private)"

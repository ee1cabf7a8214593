# SPDX-License-Identifier: Apache-2.0
"""compose.yml and its image on a real Docker engine: built once, links as the scenario says, and a run that lives.

The three tests share one image. BUILD_NETWORK, TORCH_INDEX_URL and PIP_OPTIONS go to the build, as by hand.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.trainer.record.event_log import FILE_NAME, read_events

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"isthmus-test-{os.getpid()}"
IMAGE = f"{PROJECT}:0.1.0"
ISTHMUS = str(Path(sys.executable).parent / "isthmus")
DAEMON = "10001"
BUILD_TIMEOUT_S = 1500.0
PULL_TIMEOUT_S = 300.0
TIMEOUT_S = 240.0
"""For anything that is waited for. Generous: four peers share this machine, which may be busy with other things."""
DATAGRAMS, DATAGRAMS_PER_S = 4000, 400
LATE_MS = 15.0
STREAMS = 24  # so many that losses do not keep TCP below the rate
TRAFFIC = ("python3", "-m", "scripts.wanlink.traffic")
ENVIRONMENT: dict[str, str] = {}
"""Given to Compose by a test."""
CONFIG = """
[run]
name = "composed"
outer_steps = 20000
[model]
dim = 16
num_layers = 1
num_heads = 2
hidden_dim = 32
seq_len = 32
[inner]
batch_size = 2
[outer]
inner_steps = 3
[members]
norm_guard = 1e30  # three steps of so small a model differ a lot
[checkpoint]
every = 0
[eval]
every = 0
"""


def docker(*arguments: str, timeout: float = TIMEOUT_S, check: bool = True) -> subprocess.CompletedProcess[str]:
    variables = {"IMAGE": IMAGE, "COMPOSE_PROJECT_NAME": PROJECT, "BUILDKIT_PROGRESS": "plain"}
    done = subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=os.environ | variables | ENVIRONMENT,
    )
    assert not check or done.returncode == 0, (
        f"docker {' '.join(arguments)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done


def why_impossible() -> str | None:
    try:
        for probe in (["info"], ["compose", "version"], ["buildx", "version"]):
            if docker(*probe, timeout=30, check=False).returncode:
                return f"no Docker engine: `docker {' '.join(probe)}` fails"
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "no Docker engine: there is no `docker` that answers"
    return None


IMPOSSIBLE = why_impossible()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(BUILD_TIMEOUT_S + PULL_TIMEOUT_S + 900),
    pytest.mark.skipif(IMPOSSIBLE is not None, reason=str(IMPOSSIBLE)),
]


@pytest.fixture(scope="module")
def build_log() -> Iterator[str]:
    """What the build of the image says; the image is there until the module's end."""
    base = next(
        line.split("=")[1]
        for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines()
        if line.startswith("ARG PYTHON_IMAGE=")
    )
    if docker("image", "inspect", base, check=False).returncode:
        pulled = docker("pull", base, timeout=PULL_TIMEOUT_S, check=False)
        if pulled.returncode:
            pytest.skip(f"{base} is not here and cannot be pulled: {pulled.stderr.strip()[-200:]}")
    try:
        built = docker("compose", "build", timeout=BUILD_TIMEOUT_S)
        yield built.stdout + built.stderr
    finally:
        docker("image", "rm", IMAGE, check=False)


@contextlib.contextmanager
def cleared_away() -> Iterator[None]:
    try:
        yield
    finally:
        docker("compose", "down", "--volumes", "--remove-orphans", "--timeout", "2", check=False)


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}\n{logs()}"
        time.sleep(0.5)


def logs() -> str:
    return docker("compose", "logs", "--no-color", "--tail", "40", check=False).stdout


def inside(container: str, *command: str, user: str = DAEMON) -> str:
    return docker("exec", "--user", user, "--workdir", "/opt/isthmus", container, *command).stdout


# ------------------------------------------------------------------------------------------ the image


def test_up_builds_one_image_once_with_all_that_runs_in_it(build_log: str) -> None:
    assert build_log.count("naming to") == 1
    images = docker("compose", "config", "--images").stdout.split()
    assert set(images) == {IMAGE}

    def run(*command: str) -> str:
        return docker("run", "--rm", IMAGE, *command).stdout

    look = (
        "import importlib.util as u, importlib.metadata as m; import isthmus.collective.transport as t;"
        "print([n for n in ('isthmus', 'collective', 'elastic', 'optim', 'trainer') if u.find_spec(n)]);"
        "print('stream_copy.so' in [p.name for p in __import__('pathlib').Path(t.__file__).parent.iterdir()]);"
        "print([d.name for d in m.distributions() if d.name.startswith(('nvidia-', 'cuda-'))])"
    )
    assert run("python3", "-c", look).splitlines() == ["['isthmus']", "True", "[]"]
    assert "delay 70000us" in run("python3", "/opt/isthmus/shape.py", "--link", "peer-3", "--dry-run")
    locked = {
        line.split("==")[0]: line.split("==")[1].split()[0]
        for line in (ROOT / "requirements" / "run.txt").read_text().splitlines()
        if "==" in line and ";" not in line
    }
    installed = {
        one["name"].lower().replace("_", "-"): one["version"]
        for one in json.loads(run("pip", "list", "--format", "json"))
    }
    assert {name: installed.get(name) for name in locked} == locked


# ------------------------------------------------------------------------------------------ its links


@pytest.fixture(scope="module")
def links() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = tomllib.loads((ROOT / "docker" / "scenario.toml").read_text())["links"]
    return found


def test_links_are_those_of_the_scenario(build_log: str, links: dict[str, dict[str, float]]) -> None:
    def listen(name: str, *program: str) -> tuple["subprocess.Popen[str]", str]:
        command = [
            "docker",
            "exec",
            "--user",
            DAEMON,
            "--workdir",
            "/opt/isthmus",
            containers[name],
            *TRAFFIC,
            *program,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    containers = {name: f"{PROJECT}-measured-{name}" for name in links}
    with cleared_away():
        for name, container in containers.items():
            docker(
                *("compose", "run", "--detach", "--no-deps", "--name", container, "--env", f"SHAPE_LINK={name}"),
                *("peer", "sleep", "600"),
            )
        for name, container in containers.items():
            until(f"{name} is shaped", lambda c=container: "in force" in docker("logs", c).stderr)
        template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        address = {n: docker("inspect", "--format", template, c).stdout.strip() for n, c in containers.items()}

        for source, target in (("peer-1", "peer-2"), ("peer-2", "peer-3"), ("peer-3", "peer-1")):
            echo, port = listen(target, "echo", address[target])
            trips = json.loads(inside(containers[source], *TRAFFIC, "rtt", address[target], port, "40", "5"))
            echo.kill()
            echo.communicate()
            delay = links[source]["delay_ms"] + links[target]["delay_ms"]
            jitter = links[source]["jitter_ms"] + links[target]["jitter_ms"]
            assert delay - jitter <= min(trips) <= delay + LATE_MS
            assert delay - LATE_MS <= sorted(trips)[len(trips) // 2] <= delay + jitter + 2 * LATE_MS

        counting, port = listen("peer-1", "count", address["peer-1"], "30", "5")
        inside(
            containers["peer-3"], *TRAFFIC, "numbered", address["peer-1"], port, str(DATAGRAMS), str(DATAGRAMS_PER_S)
        )
        came = json.loads(counting.communicate(timeout=60)[0])
        lost = DATAGRAMS - came["different"]
        expected = DATAGRAMS * links["peer-3"]["loss_percent"] / 100
        assert expected / 5 <= lost <= expected * 2.4  # beyond what chance does in 100,000 runs

        receiving, port = listen("peer-1", "receive", address["peer-1"], str(STREAMS), "3", "5")
        inside(containers["peer-3"], *TRAFFIC, "send", address["peer-1"], port, str(STREAMS), "reno")
        mbit = json.loads(receiving.communicate(timeout=60)[0])
        assert 0.7 * links["peer-3"]["rate_mbit"] <= mbit <= links["peer-3"]["rate_mbit"]


# ------------------------------------------------------------------------------------------ a run


class Peer:
    """One container of the service `peer`, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.container = f"{PROJECT}-peer-{number}"

    def events(self) -> list[dict[str, Any]]:
        """Of all its starts; copied, so that a dead one's can be read, too."""
        with tempfile.TemporaryDirectory() as folder:
            copied = docker("cp", f"{self.container}:/var/lib/isthmus/runs", folder, check=False)
            logs = [] if copied.returncode else list(Path(folder).glob(f"runs/*/{FILE_NAME}"))
            return [event for log in logs for event in read_events(log)]

    def commits(self) -> dict[int, str]:
        return {one["outer_step"]: one["digest"] for one in self.events() if one["event"] == "commit"}

    @property
    def step(self) -> int:
        return max(self.commits(), default=0)

    def status(self) -> Any:
        """As root, as `docker compose exec` is."""
        command = ("compose", "exec", "-T", "--index", str(self.number), "peer", "isthmus", "status", "--json")
        return json.loads(docker(*command).stdout)

    def exit_code(self) -> int:
        return int(docker("inspect", "--format", "{{.State.ExitCode}}", self.container).stdout)


def test_three_train_over_their_links_through_a_kill_a_return_a_leave_and_a_fourth(
    build_log: str, links: dict[str, dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    monkeypatch.setitem(ENVIRONMENT, "RUN_CONFIG", os.path.relpath(config, ROOT))
    one, two, three, four = (Peer(number) for number in range(1, 5))
    with cleared_away():
        docker("compose", "up", "--detach", timeout=2 * TIMEOUT_S)
        until("all three commit", lambda: min(peer.step for peer in (one, two, three)) >= 2)
        in_run = {str(peer.status()["peer_id"]): links[f"peer-{peer.number}"] for peer in (one, two, three)}
        me = one.status()
        for member in me["members"]:
            if not member["is_me"] and member["round_trip_ms"] is not None:
                ends = (in_run[member["peer_id"]], in_run[me["peer_id"]])
                least = sum(end["delay_ms"] - end["jitter_ms"] for end in ends)
                # A busy emulator does not know when each frame came, and lets some go a little early (emulator.py).
                assert least - LATE_MS <= member["round_trip_ms"] <= least + 60
        published = docker("compose", "port", "--index", "1", "peer", "9464").stdout.strip()
        with urllib.request.urlopen(f"http://{published}/metrics", timeout=30) as answer:
            assert "isthmus_outer_step" in answer.read().decode()
        with urllib.request.urlopen(f"http://{published}/status.json", timeout=30) as answer:
            assert len(json.load(answer)["members"]) in (2, 3)  # one may be excused in that moment

        docker("kill", two.container)
        killed_at = two.step
        until("the others go on", lambda: min(one.step, three.step) >= killed_at + 3)
        docker("start", two.container)
        until("the killed one is back", lambda: two.step > killed_at + 3)

        docker("compose", "up", "--detach", "--no-recreate", "--scale", "peer=4")
        until("the fourth commits", lambda: four.commits())

        docker("stop", three.container)
        assert three.exit_code() == 0  # 20 has become 0, or the engine would start it again
        assert [one["code"] for one in three.events() if one["event"] == "leave"] == [20]
        left_at = three.step
        until("the others go on", lambda: min(peer.step for peer in (one, two, four)) >= left_at + 2)

        docker("compose", "stop", "peer")
        digests: dict[int, set[str]] = {}
        for peer in (one, two, three, four):
            for step, digest in peer.commits().items():
                digests.setdefault(step, set()).add(digest)
        assert len(digests) >= left_at
        assert {step: found for step, found in digests.items() if len(found) != 1} == {}
        folders = [tmp_path / name for name in ("coordinator", "one", "two", "three", "four")]
        for folder, container in zip(
            folders, (f"{PROJECT}-coordinator-1", *(peer.container for peer in (one, two, three, four))), strict=True
        ):
            docker("cp", f"{container}:/var/lib/isthmus/runs", str(folder))
        runs = [str(path) for folder in folders for path in folder.iterdir()]
        audited = subprocess.run([ISTHMUS, "audit", *runs], capture_output=True, text=True, timeout=120, check=False)
        assert audited.returncode == 0, audited.stdout + audited.stderr

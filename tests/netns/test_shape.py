# SPDX-License-Identifier: Apache-2.0
"""docker/shape.py on a real kernel: between two network namespaces that the test makes and removes.

Where the kernel has netem its delay and loss are measured; where it has not, those of the emulator. What is said of the
emulator alone is tested on both.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
RATE_MBIT = 20
DELAY_MS = 60
RATE = f"rate_mbit = {RATE_MBIT}, queue_kb = 64"
SCENARIO = f"""
[links.thin]
rate_mbit = {RATE_MBIT}
queue_kb = 64

[links.far]
delay_ms = {DELAY_MS}
jitter_ms = 5
rate_mbit = {RATE_MBIT}
queue_kb = 64

[links.long]
delay_ms = {DELAY_MS}
rate_mbit = {RATE_MBIT}
queue_kb = 512

[links.broken]
loss_percent = 100
"""

# Prints its port, then the bytes a second that arrive. The first half second is not counted: in it the token
# bucket is still full and TCP has not found its pace.
RECEIVER = """
import socket, sys, time
host, seconds = sys.argv[1], float(sys.argv[2])
with socket.create_server((host, 0)) as server:
    server.settimeout(20)
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        connection.settimeout(20)
        started, since, nbytes = time.monotonic(), None, 0
        while piece := connection.recv(1 << 16):
            now = time.monotonic()
            if since is not None:
                nbytes += len(piece)
                if now - since > seconds - 0.5:
                    break
            elif now - started > 0.5:
                since = now
        print(nbytes / (now - since))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    try:
        while True:
            connection.sendall(bytes(1 << 16))
    except (ConnectionResetError, BrokenPipeError):
        pass  # the receiver has measured long enough
"""
# Prints the shortest of five connection set-ups, in milliseconds: one round trip each.
KNOCK = """
import socket, sys, time
host = sys.argv[1]
def knock(port):
    started = time.monotonic()
    socket.create_connection((host, port), timeout=60).close()
    return time.monotonic() - started
print(min(knock(int(sys.argv[2])) for _ in range(5)) * 1e3)
"""
ACCEPT_FIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    server.settimeout(20)
    print(server.getsockname()[1], flush=True)
    for _ in range(5):
        server.accept()[0].close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A veth pair between two namespaces; `near` is the end that is shaped."""

    near: str
    far: str
    far_address: str
    interface: str
    scenario: Path

    def shape(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run shape.py on the near end."""
        script = [sys.executable, str(DOCKER / "shape.py"), "--scenario", str(self.scenario)]
        return run([*inside(self.near), *script, "--interface", self.interface, *arguments])

    def as_daemon(self) -> list[str]:
        """What stands before a command of the user whose packets the emulator takes."""
        return [*inside(self.near), "setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--"]

    def transfer_mbit(self, seconds: float) -> float:
        """Send over TCP from near to far for so long; returns 10^6 bit/s of payload that arrived."""
        receiver = [*inside(self.far), sys.executable, "-c", RECEIVER, self.far_address, str(seconds)]
        with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as receiving:
            assert receiving.stdout is not None
            port = receiving.stdout.readline().strip()
            must([*self.as_daemon(), sys.executable, "-c", SENDER, self.far_address, port])
            result, _ = receiving.communicate(timeout=60)
        return float(result) * 8 / 1e6

    def round_trip_ms(self, *, as_root: bool = False) -> float:
        """The shortest TCP connection set-up from near to far."""
        acceptor = [*inside(self.far), sys.executable, "-c", ACCEPT_FIVE, self.far_address]
        with subprocess.Popen(acceptor, stdout=subprocess.PIPE, text=True) as accepting:
            assert accepting.stdout is not None
            port = accepting.stdout.readline().strip()
            who = inside(self.near) if as_root else self.as_daemon()
            shortest_ms = must([*who, sys.executable, "-c", KNOCK, self.far_address, port])
            accepting.communicate(timeout=60)
        return float(shortest_ms)


def inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    with tempfile.TemporaryFile("w+") as errors:  # no pipe: the emulator goes on having it, and it would not end
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=120, check=False, env=environment
        )
        errors.seek(0)
        done.stderr = errors.read()
    return done


def must(command: list[str]) -> str:
    done = run(command)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def why_impossible() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs `ip` and `tc` (install iproute2)"
    name = f"isthmus-try-{os.getpid()}"
    tried = run(["ip", "netns", "add", name])
    if tried.returncode:
        return f"`ip netns add` does not work here: {tried.stderr.strip()}"
    must(["ip", "netns", "del", name])
    return None


IMPOSSIBLE = why_impossible()
NUM_TRIES = 4
"""Of a measurement: one end may not have run in a part of it."""
pytestmark = [pytest.mark.netns, pytest.mark.skipif(IMPOSSIBLE is not None, reason=str(IMPOSSIBLE))]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    near, far = (f"isthmus-{side}-{os.getpid()}" for side in ("near", "far"))
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO)
    made = Link(near=near, far=far, far_address="10.77.0.2", interface="wan0", scenario=scenario)
    try:
        for namespace in (near, far):
            must(["ip", "netns", "add", namespace])
        must(["ip", "-n", near, "link", "add", "wan0", "type", "veth", "peer", "name", "wan0", "netns", far])
        for namespace, address in ((near, "10.77.0.1"), (far, "10.77.0.2")):
            must(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "wan0"])
            must(["ip", "-n", namespace, "link", "set", "wan0", "up"])
        yield made
    finally:
        made.shape("--clear")  # ends the emulator, which would hold the namespace
        for namespace in (near, far):
            run(["ip", "netns", "del", namespace])


@pytest.fixture
def has_netem(link: Link) -> bool:
    """Whether this kernel has netem, found out without the code under test."""
    added = run([*inside(link.far), "tc", "qdisc", "add", "dev", "wan0", "root", "netem", "delay", "1ms"])
    if added.returncode:
        return False
    must([*inside(link.far), "tc", "qdisc", "del", "dev", "wan0", "root"])
    return True


def qdisc_kinds(link: Link) -> list[str]:
    shown = must([*inside(link.near), "tc", "-j", "qdisc", "show", "dev", link.interface])
    return [qdisc["kind"] for qdisc in json.loads(shown)]


def gso_max_segs(link: Link) -> int:
    shown = must(["ip", "-n", link.near, "-d", "link", "show", "dev", link.interface])
    found = re.search(r"gso_max_segs (\d+)", shown)
    assert found is not None
    return int(found[1])


def test_tcp_transfer_runs_at_the_shaped_rate_and_not_without_it(link: Link) -> None:
    assert any(link.transfer_mbit(1.0) > 5 * RATE_MBIT for _ in range(NUM_TRIES))
    applied = link.shape("--link", "thin")
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout == f"wan0: in force: rate_mbit = {RATE_MBIT}, queue_kb = 64\n"
    assert_at_rate(link, 3.0)


def test_shape_replaces_an_earlier_one_and_clears_to_a_bare_interface(link: Link) -> None:
    before = qdisc_kinds(link)
    for _ in range(2):
        assert link.shape("--link", "thin").returncode == 0
        assert qdisc_kinds(link) == ["tbf"]
        assert gso_max_segs(link) == 1
    for _ in range(2):
        cleared = link.shape("--clear")
        assert (cleared.returncode, cleared.stdout) == (0, "wan0: in force: nothing\n")
        assert qdisc_kinds(link) == before
        assert gso_max_segs(link) == 65_535


def test_show_gives_the_kernels_counters(link: Link) -> None:
    assert link.shape("--link", "thin").returncode == 0
    shown = link.shape("--show").stdout
    assert shown.startswith(f"wan0: in force: rate_mbit = {RATE_MBIT}, queue_kb = 64\nqdisc tbf 1: root")
    assert "dropped" in shown


def test_qdisc_of_somebody_else_is_neither_replaced_nor_removed(link: Link) -> None:
    must([*inside(link.near), "tc", "qdisc", "add", "dev", "wan0", "root", "handle", "8:", "pfifo"])
    refused = link.shape("--link", "thin")
    assert refused.returncode == 3
    assert "another qdisc holds this interface" in refused.stderr
    assert link.shape("--clear").returncode == 0
    assert qdisc_kinds(link) == ["pfifo"]
    assert gso_max_segs(link) == 65_535


def assert_at_rate(link: Link, seconds: float) -> None:
    expected = pytest.approx(RATE_MBIT, rel=0.15)
    reached: list[float] = []
    while len(reached) < NUM_TRIES and (not reached or reached[-1] != expected):
        reached.append(link.transfer_mbit(seconds))
    assert reached[-1] == expected, reached


def assert_far(link: Link) -> None:
    # One way only is delayed, and jitter may take 5 ms off; a busy machine may add some.
    assert DELAY_MS - 5 <= link.round_trip_ms() <= DELAY_MS + 20


def test_delay_is_the_kernels_where_it_has_netem_and_the_emulators_where_not(link: Link, has_netem: bool) -> None:
    applied = link.shape("--link", "far")
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout == f"wan0: in force: delay_ms = {DELAY_MS}, jitter_ms = 5, {RATE}\n"
    assert qdisc_kinds(link) == (["netem", "tbf"] if has_netem else ["noqueue"])
    assert ("this kernel has no netem: the link is emulated" in applied.stderr) == (not has_netem)
    assert_far(link)


def test_emulated_link_holds_for_the_daemons_user_and_nobody_else(link: Link) -> None:
    assert link.shape("--link", "far", "--emulate").returncode == 0
    assert qdisc_kinds(link) == ["noqueue"]
    assert_far(link)
    assert link.round_trip_ms(as_root=True) < DELAY_MS / 2
    shown = link.shape("--show").stdout
    assert shown.startswith(f"wan0: in force: delay_ms = {DELAY_MS}, jitter_ms = 5, {RATE}\nemulated for user 10001: ")
    assert "'segments': 0," not in shown


def test_emulated_link_is_replaced_and_taken_off(link: Link) -> None:
    for name in ("far", "long"):
        assert link.shape("--link", name, "--emulate").returncode == 0
        assert_far(link)
    cleared = link.shape("--clear")
    assert (cleared.returncode, cleared.stdout) == (0, "wan0: in force: nothing\n"), cleared.stderr
    assert link.round_trip_ms() < DELAY_MS / 2
    assert "uplink0" not in must(["ip", "-n", link.near, "link"]) + must(["ip", "-n", link.near, "rule"])


def test_nothing_is_sent_past_an_emulator_that_died(link: Link) -> None:
    assert link.shape("--link", "far", "--emulate").returncode == 0
    emulators = [int(pid) for pid in must(["ip", "netns", "pids", link.near]).split()]
    assert len(emulators) == 1
    os.kill(emulators[0], signal.SIGKILL)
    lone = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=1)"
    tried = run([*link.as_daemon(), sys.executable, "-c", lone, link.far_address])
    assert "ConnectionRefusedError" not in tried.stderr
    assert "Error" in tried.stderr
    shown = link.shape("--show")
    assert shown.returncode == 3
    assert "the emulator has ended, nothing leaves this container" in shown.stderr
    assert link.shape("--link", "far", "--emulate").returncode == 0  # and begins anew
    assert_far(link)


@pytest.mark.parametrize("options", [[], ["--emulate"]], ids=["as the kernel can", "emulated"])
def test_rate_holds_behind_a_delay(link: Link, options: list[str]) -> None:
    # No jitter, which reorders, and a queue beyond rate × delay: else it is TCP that stays below the rate.
    assert link.shape("--link", "long", *options).returncode == 0
    assert_at_rate(link, 4.0)


def test_link_that_loses_everything_lets_nothing_through(link: Link) -> None:
    assert link.shape("--link", "broken").returncode == 0
    lone = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=1)"
    tried = run([*link.as_daemon(), sys.executable, "-c", lone, link.far_address])
    assert "TimeoutError" in tried.stderr  # without the loss it would be ConnectionRefusedError


def test_entrypoint_shapes_with_the_capabilities_of_compose_and_keeps_none(link: Link) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    folder = Path(tempfile.mkdtemp(prefix="shape-"))  # readable for the user that the entrypoint becomes
    try:
        folder.chmod(0o755)
        for name in ("entrypoint.sh", "shape.py"):
            shutil.copy(DOCKER / name, folder)
        granted = ["setpriv", "--bounding-set=-all,+net_admin,+sys_nice,+setuid,+setgid", "--no-new-privs", "--"]
        look = [str(folder / "entrypoint.sh"), "sh", "-c", "id -u; grep CapEff /proc/self/status"]
        variables = {"SHAPE_LINK": "thin", "SHAPE_SCENARIO": str(link.scenario), "SHAPE_INTERFACE": "wan0"}
        done = run([*inside(link.near), *granted, *look], **variables)
        variables["SHAPE_LINK"] = "thick"
        refused = run([*inside(link.near), *granted, *look], **variables)
        kept_down = run([*inside(link.near), *granted, *look], **variables, ON_FAILURE="1")
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"10001\nCapEff:\t{0:016x}\n"
    assert qdisc_kinds(link) == ["tbf"]
    assert (refused.returncode, kept_down.returncode) == (2, 0)
    assert refused.stdout == kept_down.stdout == ""  # nothing was run over an unshaped link
    assert "exit code 2, which no restart cures" in kept_down.stderr

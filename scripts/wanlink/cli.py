# SPDX-License-Identifier: Apache-2.0
"""`scripts/wan`: what this machine offers, how good the emulation is here, and a command on an emulated network.

    scripts/wan probe
    scripts/wan bench [--delay-ms 25 --loss-percent 0.1 --rate-mbit 1000 --streams 8 --congestion bbr]
    scripts/wan run SCENARIO.json -- COMMAND...

`run` starts the command once for each peer, in the peer's namespace, with WAN_PEER (its index), WAN_PEERS and
WAN_ADDRESSES (comma-separated) in its environment; the timeline begins when all have been started.

Exit codes: 0 done; 1 a measurement is out of tolerance, or a peer's command failed; 2 usage or scenario; 3 this machine
lacks something; 130 interrupted.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from scripts.wanlink import traffic
from scripts.wanlink.scenario import Scenario, ScenarioError, Step, read
from scripts.wanlink.wan import Wan, WanError

# Printed, because they decide what TCP reaches; a new namespace gets the host's values unless a scenario sets them.
TELLING_SYSCTLS = (
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_available_congestion_control",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_no_metrics_save",
)
RTT_TOLERANCE_MS = 1.0
LOSS_TOLERANCE = 0.10
LOSS_SEGMENTS = 100_000
LOSS_PERCENT = 1.0
# Payload within an Ethernet frame's 1514 bytes: 1500 less IP and TCP headers with timestamps.
PAYLOAD_SHARE = 1448 / 1514


def probe() -> int:
    """Say what this machine has; 3 if a network cannot be made."""
    print(f"kernel {platform.release()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    try:
        with Wan(peers=2) as wan:
            for name in TELLING_SYSCTLS:
                print(f"{name} = {sysctl(wan, 0, name)}    (in a new namespace)")
            trips = traffic.measure_rtt(wan, 0, 1, count=50)
    except WanError as error:
        print(f"no emulated network here: {error}")
        return 3
    print(f"emulated network: yes; round trip with nothing set {statistics.median(trips):.2f} ms (median of 50)")
    return 0


def sysctl(wan: Wan, peer: int, name: str) -> str:
    """A setting as it is in a peer's namespace."""
    return " ".join(wan.run(peer, ["cat", f"/proc/sys/{name.replace('.', '/')}"], timeout=10).split())


def bench(options: argparse.Namespace) -> int:
    """Measure round trip, loss and throughput against what is set; 1 if one is out of tolerance."""
    port = {"up_mbit": options.rate_mbit, "down_mbit": options.rate_mbit, "queue_ms": options.queue_ms}
    verdicts = []
    with Wan(scenario=Scenario(peers=2, start=Step(ports={"*": port}))) as wan:
        print(f"set: {options.delay_ms:g} ms one way, {options.loss_percent:g} % loss each way, {port}")
        for name in TELLING_SYSCTLS:
            print(f"     {name} = {sysctl(wan, 0, name)}")
        wan.set_link("*", "*", delay_ms=options.delay_ms)
        trips = traffic.measure_rtt(wan, 0, 1, count=200)
        error_ms = statistics.mean(trips) - 2 * options.delay_ms
        verdicts.append(abs(error_ms) <= RTT_TOLERANCE_MS)
        print(
            f"round trip: mean {statistics.mean(trips):.2f} ms, {min(trips):.2f} to {max(trips):.2f} "
            f"(set {2 * options.delay_ms:g}; off by {error_ms:+.2f}, tolerance {RTT_TOLERANCE_MS:g})"
        )
        wan.set_link(0, 1, loss_percent=LOSS_PERCENT)
        came = traffic.measure_datagrams(wan, 0, 1, count=LOSS_SEGMENTS, per_s=40_000)["different"]
        loss = 1 - came / LOSS_SEGMENTS
        verdicts.append(abs(loss / (LOSS_PERCENT / 100) - 1) <= LOSS_TOLERANCE)
        print(f"loss: {100 * loss:.3f} % of {LOSS_SEGMENTS} datagrams (set {LOSS_PERCENT:g} %)")
        wan.set_link("*", "*", loss_percent=options.loss_percent)
        for streams in options.streams:
            reached = traffic.measure_throughput(
                wan, 0, 1, streams=streams, congestion=options.congestion, warm_up_s=2, seconds=options.seconds
            )
            print(
                f"{options.congestion}, {streams} streams: {reached.mbit:.0f} Mbit/s payload of at most "
                f"{options.rate_mbit * PAYLOAD_SHARE:.0f}, emulator {100 * reached.cpu_share:.0f} % of one core, "
                f"{reached.retransmitted} segments sent again"
            )
        stats = wan.stats()
        print(
            f"late by more than 1 ms: {stats.late} of {stats.delivered} (by {1e3 * stats.late_max_s:.1f} ms at most); "
            f"lost beyond what was set: {stats.device_drops + stats.unwritten + stats.overflowed}"
        )
    print("within tolerance" if all(verdicts) else "OUT OF TOLERANCE: is the machine busy?")
    return 0 if all(verdicts) else 1


def run(scenario: Scenario, command: Sequence[str]) -> int:
    """Run the command on every peer; 0 if all succeed, else 1."""
    with Wan(scenario=scenario) as wan:
        addresses = ",".join(wan.address(peer) for peer in range(wan.peers))
        processes = []
        printers = []
        for peer in range(wan.peers):
            environment = {**os.environ, "WAN_PEER": str(peer), "WAN_PEERS": str(wan.peers), "WAN_ADDRESSES": addresses}
            process = wan.popen(
                peer, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert process.stdout is not None
            printers.append(threading.Thread(target=_print_lines, args=(peer, process.stdout), daemon=True))
            processes.append(process)
        wan.play()
        for printer in printers:
            printer.start()
        codes = [process.wait() for process in processes]
        for printer in printers:
            printer.join(timeout=5)  # a daemon that the command left behind may hold the pipe; closing kills it
        print(f"exit codes: {codes}; emulator {wan.stats().cpu_s:.1f} s of CPU", file=sys.stderr)
    return 0 if not any(codes) else 1


def _print_lines(peer: int, lines: IO[str]) -> None:
    for line in lines:
        print(f"[{peer}] {line}", end="", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/wan", description="An emulated wide-area network on this machine.")
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("probe", help="say what this machine offers")
    measuring = what.add_parser("bench", help="compare what is set with what is measured")
    measuring.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    measuring.add_argument("--loss-percent", type=float, default=0.1, help="each way")
    measuring.add_argument("--rate-mbit", type=float, default=1000.0, help="of every uplink and downlink")
    measuring.add_argument("--queue-ms", type=float, default=64.0, help="room before each of them")
    measuring.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    measuring.add_argument("--congestion", default="bbr")
    measuring.add_argument("--seconds", type=float, default=6.0)
    running = what.add_parser("run", help="run a command on every peer of a scenario")
    running.add_argument("scenario", type=Path)
    running.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(arguments)
    story: Exception
    try:
        match options.what:
            case "probe":
                return probe()
            case "bench":
                return bench(options)
            case _:
                return run(read(options.scenario.read_text()), options.command)
    except (ScenarioError, OSError) as error:
        code, story = 2, error
    except WanError as error:
        code, story = 3, error
    except KeyboardInterrupt:
        return 130
    print(f"wan: {story}", file=sys.stderr)
    return code

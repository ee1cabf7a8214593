#!/usr/bin/env python3
"""The exchange over wide-area networks: which networks, how much, and what would be the best possible time.

So far it prints the networks and their bounds; the measured exchange joins them here.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.wanlink.bounds import LowerBound, lower_bound
from scripts.wanlink.scenario import Scenario, Step

MIB = 1 << 20
QUEUE_MS = 64.0  # room before each transmitter, as time at its rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network and one exchange.

    Attributes:
        name, text: for the report.
        nbytes: fp32 tensor to be averaged.
        rtt_ms, loss_percent: of every path; the loss is each way.
        up_mbit, down_mbit: [peer], 10⁶ bit/s.
    """

    name: str
    text: str
    nbytes: int
    rtt_ms: float
    loss_percent: float
    up_mbit: tuple[float, ...]
    down_mbit: tuple[float, ...]

    def scenario(self, seed: int = 1) -> Scenario:
        """The network, for the emulator."""
        ports = {
            str(peer): {"up_mbit": up, "down_mbit": down, "queue_ms": QUEUE_MS}
            for peer, (up, down) in enumerate(zip(self.up_mbit, self.down_mbit, strict=True))
        }
        links = {"*": {"delay_ms": self.rtt_ms / 2, "loss_percent": self.loss_percent}}
        return Scenario(peers=len(self.up_mbit), seed=seed, start=Step(links=links, ports=ports))

    def bound(self) -> LowerBound:
        """No butterfly all-reduce of uncompressed fp32 is faster."""
        up, down = ([mbit * 1e6 / 8 for mbit in rates] for rates in (self.up_mbit, self.down_mbit))
        return lower_bound(self.nbytes, up, down, one_way_s=self.rtt_ms / 2e3)


CASES = (
    Case(
        name="a",
        text="2 peers, 1 Gbit/s, 50 ms, 0.1 % loss",
        nbytes=128 * MIB,
        rtt_ms=50,
        loss_percent=0.1,
        up_mbit=(1000,) * 2,
        down_mbit=(1000,) * 2,
    ),
    Case(
        name="b",
        text="4 peers, 200 Mbit/s, 150 ms, 0.1 % loss",
        nbytes=64 * MIB,
        rtt_ms=150,
        loss_percent=0.1,
        up_mbit=(200,) * 4,
        down_mbit=(200,) * 4,
    ),
    Case(
        name="c",
        text="4 peers, 300 Mbit/s, 20 ms, no loss, one uplink of 30 Mbit/s",
        nbytes=64 * MIB,
        rtt_ms=20,
        loss_percent=0,
        up_mbit=(300, 300, 300, 30),
        down_mbit=(300,) * 4,
    ),
)


def main() -> int:
    """Print each case with its bound; returns the exit code."""
    for case in CASES:
        bound = case.bound()
        shares = ", ".join(f"{share:.3f}" for share in bound.shares)
        print(f"({case.name}) {case.text}, {case.nbytes // MIB} MiB")
        print(f"    at best {bound.seconds:.3f} s, with slices of {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

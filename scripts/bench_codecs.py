# SPDX-License-Identifier: Apache-2.0
"""Speed and error of every codec on one core, on chunks as a round sees them.

GB/s are of the fp32 input. Encoding includes the finite check, decoding and accumulating include `check`. Median of
many calls on warm buffers; the spread is from the fifth of the calls that were fastest to the fifth that were slowest.

    python scripts/bench_codecs.py --json codecs.json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from isthmus.collective.codec import Codec, codec_named, codec_names

CHUNK_NBYTES = (1 << 19, 1 << 20, 1 << 21)
ITEM_NBYTES = 4
WARM_UP_CALLS = 5


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s of fp32."""

    median: float
    slow: float
    fast: float

    def __str__(self) -> str:
        return f"{self.median:6.1f} ({self.slow:.1f}-{self.fast:.1f})"


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one size of chunk."""

    codec: str
    chunk_nbytes: int
    encode: Speed
    decode: Speed
    accumulate: Speed
    bytes_per_element: float
    relative_l2_error: float


def speed_of(call: Callable[[], object], nbytes: int, num_calls: int) -> Speed:
    """Time single calls."""
    for _ in range(WARM_UP_CALLS):
        call()
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    fast, slow = seconds[num_calls // 5], seconds[num_calls - 1 - num_calls // 5]
    return Speed(*(round(nbytes / value / 1e9, 2) for value in (statistics.median(seconds), slow, fast)))


def measure(codec: Codec, chunk_nbytes: int, num_calls: int) -> Row:
    """Encode, decode and accumulate one chunk of Gaussian values."""
    numel = chunk_nbytes // ITEM_NBYTES
    source = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    memory = torch.zeros(codec.wire_nbytes(numel), dtype=torch.uint8)
    out, total = torch.zeros(numel), torch.zeros(numel)

    def decode() -> None:
        codec.check(wire, numel)
        codec.decode(wire, out)

    def accumulate() -> None:
        codec.check(wire, numel)
        codec.accumulate(wire, 1e-3, total, 1.0, total)

    wire = codec.encode(source, memory)
    decode()
    return Row(
        codec=codec.name,
        chunk_nbytes=chunk_nbytes,
        encode=speed_of(lambda: codec.encode(source, memory), chunk_nbytes, num_calls),
        decode=speed_of(decode, chunk_nbytes, num_calls),
        accumulate=speed_of(accumulate, chunk_nbytes, num_calls),
        bytes_per_element=len(wire) / numel,
        relative_l2_error=float((out - source).norm() / source.norm()),
    )


def print_table(rows: Sequence[Row]) -> None:
    """One line a row."""
    titles = " ".join(f"{title + ' GB/s':>20}" for title in ("encode", "decode", "accumulate"))
    print(f"{'codec':8} {'KiB':>5} {titles} {'B/el':>7} {'error':>8}")
    for row in rows:
        speeds = " ".join(f"{speed!s:>20}" for speed in (row.encode, row.decode, row.accumulate))
        kib = row.chunk_nbytes >> 10
        print(f"{row.codec:8} {kib:5} {speeds} {row.bytes_per_element:7.4f} {row.relative_l2_error:8.5f}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append", help="only this one (may be repeated), for example topk:32")
    parser.add_argument("--calls", type=int, default=101, help="timed calls for each figure, at least 15")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(argv)
    if options.calls < 15:
        parser.error("--calls must be at least 15")
    torch.set_num_threads(1)
    names = options.codec or codec_names()
    rows = [measure(codec_named(name), nbytes, options.calls) for name in names for nbytes in CHUNK_NBYTES]
    print_table(rows)
    if options.json:
        figures = {"torch": torch.__version__, "threads": 1, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

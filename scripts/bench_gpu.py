# SPDX-License-Identifier: Apache-2.0
"""What a GPU makes of this project: one command, eight minutes at most, and nothing needed but torch.

    python scripts/bench_gpu.py --json gpu.json                    # scripts/bench gpu does the same, and sets up .venv
    python scripts/bench_gpu.py --wheels wheels --json gpu.json    # with what `scripts/wheels wheels` has collected
    python scripts/bench_gpu.py --device cpu --presets tiny        # the same code on a CPU: no figure means anything

Its parts, in this order, each in a process of its own:

    machine    device, processor, versions, missing packages
    tests      tests/gpu: codecs, mailbox, NCCL, FSDP2, inner steps, a run of two peers on the device
    codecs     the bytes of the CPU? GB/s on the device, and over today's way
    copies     GB/s between the device and locked memory, by the worker's own code
    training   tokens/s, MFU and memory of a worker against a bare PyTorch loop, for every preset
    outer      for how long workers stand still for an outer step, in real daemons; of the first preset

A part whose packages are missing is left out, and the output names them. Exit code: 0 all well · 1 a part failed ·
3 no CUDA device. FILE is written anew after every part, so that what was measured is kept whatever happens later.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_LIMITS_S = {"machine": 60.0, "tests": 170.0, "codecs": 60.0, "copies": 40.0, "training": 100.0, "outer": 120.0}
"""By part: when it is killed, if there is still so much time."""
_SLOWER = {"cuda": 1.0, "cpu": 4.0}
"""How much longer parts may take: the CPU of a busy machine is not what is measured."""
_MODULES = {"tests": "suite"}
"""Where a part's module has another name."""
_TAIL_CHARS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; returns the exit code."""
    options = _options(arguments)
    if options.part is not None:
        return _measure(options)
    ends_at = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(options.wheels, Path(folder))
        if options.device == "cuda" and not _has_device(environment):
            print(
                "bench gpu: this machine has no CUDA device; --device cpu runs the same code without one",
                file=sys.stderr,
            )
            return 3
        parts: dict[str, Any] = {}
        for name, part, preset in _plan(options):
            limit_s = min(_LIMITS_S[part] * _SLOWER[options.device], ends_at - time.monotonic())
            words = ["--part", part, "--device", options.device, "--presets", preset, "--limit-s", f"{limit_s:.0f}"]
            parts[name] = _run(words, limit_s, environment, Path(folder, "part.json"))
            print(_line(name, parts[name]), flush=True)
            if options.json:
                options.json.write_text(json.dumps({"device": options.device, "parts": parts}, indent=1) + "\n")
    bad = [name for name, part in parts.items() if not part.get("ok", True)]
    if bad:
        print(f"bench gpu: not well: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def _plan(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(name in the output, part, preset) in order."""
    plan = []
    for part in options.parts:
        if part == "training":
            plan += [(f"training {preset}", part, preset) for preset in options.presets]
        else:
            plan.append((part, part, options.presets[0]))
    return plan


def _run(words: Sequence[str], limit_s: float, environment: dict[str, str], told: Path) -> dict[str, Any]:
    """One part, and all its processes, to their end or to that of its time."""
    if limit_s <= 1.0:
        return {"left_out": "no time was left"}
    told.unlink(missing_ok=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, *words, "--json", str(told)],
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        error: str | None = f"not done after {limit_s:.0f} s"
    else:
        error = f"ended with {process.returncode}" if process.returncode else None
    figures: dict[str, Any] = json.loads(told.read_text()) if told.exists() else {}
    figures["seconds"] = round(time.monotonic() - began, 1)
    if error is not None:
        figures |= {"ok": False, "error": error, "output": output[-_TAIL_CHARS:]}
    return figures


def _measure(options: argparse.Namespace) -> int:
    """The inside of a part's process."""
    import importlib

    from scripts.gpubench.task import Task

    task = Task(options.part, options.device, options.presets[0], options.limit_s, options.json)
    try:
        module = importlib.import_module(f"scripts.gpubench.{_MODULES.get(options.part, options.part)}")
    except ModuleNotFoundError as error:
        figures = {"left_out": f"{error.name} is not installed"}
    else:
        figures = module.measure(task)
    task.keep(figures)
    return 0


def _environment(wheels: Path | None, folder: Path) -> dict[str, str]:
    """Of a part's process: this checkout, and behind it what of the wheels is not installed here."""
    site = folder / "site"
    site.mkdir()
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not _is_installed(wheel.name)] if wheels else []
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        subprocess.run([*command, *map(str, missing)], check=True)
    if not _is_installed("isthmus"):  # a peer tells others its version
        project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
        about = site / f"isthmus-{project['version']}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: isthmus\nVersion: {project['version']}\n")
    inherited = os.environ.get("PYTHONPATH")
    path = [str(_ROOT / "src"), str(_ROOT), str(site), *([inherited] if inherited else [])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def _is_installed(name: str) -> bool:
    """A distribution, or that of a wheel's file, in whatever version."""
    try:
        distribution(name.partition("-")[0])
    except PackageNotFoundError:
        return False
    return True


def _has_device(environment: dict[str, str]) -> bool:
    # In a process of its own: one that has asked CUDA for devices should not fork.
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], env=environment, check=False).returncode == 0


def _line(name: str, figures: dict[str, Any]) -> str:
    """What people read; all of it is in the file."""
    shown = {key: value for key, value in figures.items() if key not in ("stories", "output", "skipped", "losses")}
    text = f"{name:16} {json.dumps(shown)}"
    for test, story in figures.get("stories", {}).items():
        text += f"\n  {test}\n{story}"
    return text + (f"\n{figures['output']}" if "output" in figures else "")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where; cuda")
    parser.add_argument("--presets", nargs="+", default=["150m", "1b"], metavar="NAME", help="models; 150m 1b")
    parser.add_argument("--parts", nargs="+", choices=list(_LIMITS_S), default=list(_LIMITS_S), help="only these")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together; 8")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages for what is not installed here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--part", choices=list(_LIMITS_S), help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=60.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())

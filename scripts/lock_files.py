# SPDX-License-Identifier: Apache-2.0
"""What scripts/dependencies does with the files.

    lock_files.py FROM TO                     what uv has resolved → what is kept: all with hashes, torch apart
    lock_files.py --check FOLDER PYPROJECT    whether every requirement of the project is locked
    lock_files.py --audited FILE CODE         what pip-audit has found, in one line a fault
    lock_files.py --carried FOLDER            of the lock what scripts/wheels collects

torch has no hash: which of its builds is installed depends on the index (with CUDA, for a CPU, from a machine's own
disk), and so do the libraries that it brings along. It names those by exact versions itself.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
_BROUGHT_BY_TORCH = re.compile("filelock|fsspec|jinja2|markupsafe|mpmath|networkx|setuptools|sympy|typing-extensions")
_FOR_TESTS = re.compile(
    "execnet|hypothesis|iniconfig|packaging|pluggy|pygments|pytest|pytest-asyncio|pytest-timeout|pytest-xdist"
    "|sortedcontainers"
)
_LOCKED_EXTRAS = ("test", "check", "plot")
_HEAD = "# Made by `scripts/dependencies lock` from pyproject.toml; not by hand.\n"


def split(source: Path, target: Path) -> None:
    """Write the files of `target`."""
    for path in sorted(source.glob("*.txt")):
        packages = re.split(r"(?m)^(?=\S)", path.read_text())
        kept = [package for package in packages if package and not _OF_TORCH.match(package)]
        (target / path.name).write_text(_HEAD + "".join(kept))
        for package in packages:
            if package.startswith("torch=="):
                (target / "torch.txt").write_text(f"{_HEAD}{package.split()[0]}\n")


def missing(folder: Path, pyproject: Path) -> list[str]:
    """Requirements of the project that no version in the lock fits."""
    from packaging.requirements import Requirement

    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in _LOCKED_EXTRAS for item in extras[extra])]
    locked: dict[str, set[str]] = {}
    for path in (folder / "dev.txt", folder / "torch.txt"):
        for name, version in re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^ ;]+)", path.read_text()):
            locked.setdefault(_plain(name), set()).add(version.strip())
    fits = {item: Requirement(item) for item in wanted}
    return [
        item
        for item, requirement in fits.items()
        if not any(requirement.specifier.contains(version) for version in locked.get(_plain(requirement.name), ()))
    ]


def carried(folder: Path) -> str:
    """What the project needs beside torch and what torch brings, and what its tests need, as a file for pip."""
    needed = {name: package for name, package in _packages(folder / "run.txt") if not _BROUGHT_BY_TORCH.fullmatch(name)}
    needed |= {name: package for name, package in _packages(folder / "dev.txt") if _FOR_TESTS.fullmatch(name)}
    return "".join(needed.values())


def _packages(path: Path) -> Iterator[tuple[str, str]]:
    """(name, version with its hashes) of what Linux needs; of two versions the older one, which fits newer Pythons too.

    pip would ask the Python that it runs in for conditions, and not the one that the packages are for.
    """
    for package in reversed(re.split(r"(?m)^(?=[^\s#])", path.read_text())):
        pinned, _, hashes = package.partition("\\")
        version, _, condition = pinned.partition(";")
        if "==" in version and "win32" not in condition:
            yield version.split("==")[0], f"{version.strip()} \\{hashes}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def judge(path: Path, code: str) -> int:
    """Say what was found; returns the exit code."""
    packages = json.loads(path.read_text())["dependencies"] if path.exists() else []
    known = [package for package in packages if "skip_reason" not in package]
    if not known:
        print(f"dependencies: not looked up, nobody with known faults can be asked from here (pip-audit: {code})")
        return 0
    faults = [(package, fault) for package in known for fault in package["vulns"]]
    for package, fault in faults:
        fixed = ", ".join(fault["fix_versions"]) or "none yet"
        print(f"dependencies: {package['name']} {package['version']} has {fault['id']}; fixed in: {fixed}")
    print(f"dependencies: {len(known)} of {len(packages)} looked up, {len(faults)} known faults")
    return int(bool(faults))


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    match arguments:
        case ["--check", folder, pyproject]:
            lacking = missing(Path(folder), Path(pyproject))
            for requirement in lacking:
                print(f"{requirement} is not locked; run scripts/dependencies lock", file=sys.stderr)
            return int(bool(lacking))
        case ["--audited", path, code]:
            return judge(Path(path), code)
        case ["--carried", folder]:
            print(carried(Path(folder)), end="")
            return 0
        case [source, target]:
            split(Path(source), Path(target))
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Makes stream_copy.so beside its source when the project is installed or packed. Where it cannot, it goes on."""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/isthmus/collective/transport/stream_copy.c")
LIBRARY = SOURCE.with_suffix(".so")


class CustomBuildHook(BuildHookInterface):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatch's signature
        """Before files are collected, of an editable installation too."""
        library = Path(self.root) / LIBRARY
        if not compile_library(Path(self.root) / SOURCE, library):
            library.unlink(missing_ok=True)
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(source: Path, library: Path) -> bool:
    """Whether it is there now. A running process keeps the one that it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    made = library.with_name(f"{library.name}.{os.getpid()}")
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(made), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        made.replace(library)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        print(f"isthmus: {LIBRARY} was not made, an ordinary copy does its work: {why}", file=sys.stderr)
        made.unlink(missing_ok=True)
        return False
    return True

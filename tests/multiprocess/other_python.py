# SPDX-License-Identifier: Apache-2.0
"""`isthmus` under a Python of another patch version: its standard library has other sources.

Not a test: `python other_python.py FOLDER join ...`, where FOLDER holds those sources. Everything else is the product.
"""

import platform
import sys
import sysconfig
from typing import Any

from isthmus.trainer.cli.app import main

VERSION = "3.98.7"


def pretend(folder: str) -> None:
    """Let this process believe that it runs under that Python."""
    get_path = sysconfig.get_path

    def get_other_path(name: str, *arguments: Any, **more: Any) -> str:
        return folder if name == "stdlib" else get_path(name, *arguments, **more)

    sysconfig.get_path = get_other_path  # type: ignore[assignment]
    platform.python_version = lambda: VERSION


if __name__ == "__main__":
    pretend(sys.argv.pop(1))
    main()

# SPDX-License-Identifier: Apache-2.0
"""Which Python, which torch, which isthmus. Most of our modules need torch, so this one says what is wrong with it."""

import platform
from importlib.metadata import version

from isthmus.trainer.doctor.report import Check, fail, ok


def python() -> Check:
    """Which Python, which torch, which isthmus."""
    own = f"Python {platform.python_version()}"
    try:
        import torch
    except (ImportError, OSError) as error:
        return fail(
            "python", f"{own}; torch cannot be loaded: {error}", "install isthmus anew in an environment of its own"
        )
    build = "for the CPU" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return ok(
        "python",
        f"{platform.python_version()}, torch {torch.__version__} ({build}), isthmus {version('isthmus')}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        isthmus=version("isthmus"),
    )

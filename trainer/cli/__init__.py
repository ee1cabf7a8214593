# SPDX-License-Identifier: Apache-2.0
"""The command `isthmus`: its commands, how one runs a daemon, and what is shown on a terminal."""

from isthmus.trainer.cli.app import main

__all__ = ["main"]

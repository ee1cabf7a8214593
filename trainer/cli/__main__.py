# SPDX-License-Identifier: Apache-2.0
"""`python -m isthmus.trainer.cli` is the command `isthmus`."""

from isthmus.trainer.cli import main

main()

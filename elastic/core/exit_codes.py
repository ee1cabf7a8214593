# SPDX-License-Identifier: Apache-2.0
"""How a peer's part in the run ends, as the exit code of its process (README.md)."""

DONE, UNREACHABLE, REFUSED, NO_STATE, TRAINING, INTEGRITY, LEFT = 0, 4, 5, 7, 8, 9, 20

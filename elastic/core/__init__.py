# SPDX-License-Identifier: Apache-2.0
"""Pure machines of membership and commit: no IO, no clock, no randomness."""

# SPDX-License-Identifier: Apache-2.0
"""Pure machines of the collective layer: no IO, no clock, no tensors."""

# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a machine, and with the way from it to a run."""

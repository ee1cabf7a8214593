# SPDX-License-Identifier: Apache-2.0
"""The text that a run trains on, its samples, and where a peer gets it from."""

# SPDX-License-Identifier: Apache-2.0
"""The shared state as bytes: digests, where two states differ, and the words on a STATE connection."""

# SPDX-License-Identifier: Apache-2.0
"""Serving the shared state and recorded commits to learners, while training goes on."""

# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own joins a run; see trainer/README.md."""

# SPDX-License-Identifier: Apache-2.0
"""One peer's outer steps: training, payloads, exchanges, the shared state and its versions."""

# SPDX-License-Identifier: Apache-2.0
"""What a peer's disk holds of a run: checkpoints, results since then, its own state, certificates; and exports."""

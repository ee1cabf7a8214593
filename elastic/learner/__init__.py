# SPDX-License-Identifier: Apache-2.0
"""Getting to the newest committed state, or to the run's text, from whoever has it."""

# SPDX-License-Identifier: Apache-2.0
"""Parts of scripts/bench_convergence.py: many small models in one, real text, real codecs, and what is compared."""

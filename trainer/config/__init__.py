# SPDX-License-Identifier: Apache-2.0
"""What a run and a peer can be told: sections, sources, the run manifest, and what follows from them for the parts."""

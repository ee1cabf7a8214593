# SPDX-License-Identifier: Apache-2.0
"""How a peer comes to a run: ticket, identity, admission, and who is let in."""

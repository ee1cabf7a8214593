# SPDX-License-Identifier: Apache-2.0
"""What happened and how things stand: events, status, metrics, and what they say of a peer that has ended."""

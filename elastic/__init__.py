# SPDX-License-Identifier: Apache-2.0
"""WHO takes part, and getting them to the same state: membership, commits, journal, leases. See README.md."""

"""WHO takes part, and getting them to the same state: membership, commits, journal, leases. See README.md."""

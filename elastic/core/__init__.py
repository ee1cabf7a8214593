"""Pure machines of membership and commit: no IO, no clock, no randomness."""

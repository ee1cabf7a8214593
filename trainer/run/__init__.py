# SPDX-License-Identifier: Apache-2.0
"""A running process: a peer with its daemon, founding, coordination, and the socket that the commands talk to."""

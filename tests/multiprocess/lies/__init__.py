# SPDX-License-Identifier: Apache-2.0
"""What the peer of liar.py may do: each lie changes one thing of the program it runs in. Not tests."""

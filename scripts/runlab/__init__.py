# SPDX-License-Identifier: Apache-2.0
"""A run for trying things out: peers as processes of this machine, over an emulated WAN, and faults by command.

places.py   a name such as us-eu-asia as a network of scripts/wanlink
sites.py    one peer: its process, what its events say, what can be done to it
lab.py      all of them, and the orders that they take
orders.py   how an order comes from another terminal
cli.py      the command
"""

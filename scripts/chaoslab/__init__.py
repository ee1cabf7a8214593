# SPDX-License-Identifier: Apache-2.0
"""Real `isthmus` processes train while they are killed, frozen, cut off and starved of disk; what is left is judged.

cli.py        the command
world.py      coordinator and peers as processes, their logs as they grow; host.py: namespaces and disks, where root;
              roles.py: the command lines
faults.py     what can be done to them; injector.py: when, and to whom
evidence.py   what is left when it is over: journal, logs, faults, waits
verdict.py    checks of the evidence, pure; recovery.py: how soon the others went on; report.py: for people and JSON
"""

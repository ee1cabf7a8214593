# SPDX-License-Identifier: Apache-2.0
"""A wide-area network between 2 to 8 network namespaces of one machine.

    from scripts.wanlink.wan import Wan

    with Wan(peers=4) as wan:
        wan.set_link("*", "*", delay_ms=75, loss_percent=0.1)
        wan.set_port("*", up_mbit=200, down_mbit=200)
        processes = [wan.popen(i, ["my-program", wan.address(i)]) for i in range(4)]
        wan.cut(0, 1)

One process, the emulator, holds a TUN device in every namespace and passes packets between them the way a path of
that delay, loss and rate would. It needs root (or `unshare -rn`) and /dev/net/tun, and nothing outside Python's
standard library but util-linux' `nsenter`; no kernel module, so also no netem.

    packets     one frame: where it goes, how many segments it holds, cutting it
    links       one path and one port: what they do to a segment
    switch      the packet's way through both, and what happens when
    scenario    what paths and ports are to be, now and later; JSON
    namespaces  what is asked of the kernel
    emulator    the process
    uplink      the same before one interface of a container, for docker/shape.py
    wan         the class above
    traffic     programs that measure a path from its two ends
    bounds      how fast an exchange could be at best
    cli         `scripts/wan`

Rules: packets, links, switch, scenario and bounds are pure: no IO, no clock, and no randomness but a seeded one.
Nothing here knows isthmus.
"""

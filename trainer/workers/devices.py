# SPDX-License-Identifier: Apache-2.0
"""Where a peer's workers compute, found out before anybody is told of the peer."""

import torch

from isthmus.trainer.config.job import Device
from isthmus.trainer.errors import EnvironmentFault


def choose_device(wanted: Device, num_workers: int) -> str:
    """`cuda` or `cpu`. Only counts devices, and opens none.

    Raises:
        EnvironmentFault: there are fewer devices than workers.
    """
    if wanted == "cpu":
        return "cpu"
    num_devices = torch.cuda.device_count()
    if wanted == "auto" and num_devices == 0:
        return "cpu"
    if num_devices < num_workers:
        need = (
            "1 worker needs a CUDA device" if num_workers == 1 else f"{num_workers} workers need as many CUDA devices"
        )
        raise EnvironmentFault(
            f"{need}, and this machine shows {num_devices}",
            cure="set node.local_workers to the number of devices, or node.device to cpu",
        )
    return "cuda"

# SPDX-License-Identifier: Apache-2.0
"""What workers compute on, and in which numbers."""

import pytest

from isthmus.trainer.config.job import choose_precision
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.workers.devices import peak_flops, require_compiler


@pytest.mark.parametrize(
    ("wanted", "device", "precision"),
    [("auto", "cuda", "bf16"), ("auto", "cpu", "fp32"), ("fp32", "cuda", "fp32"), ("bf16", "cpu", "bf16")],
)
def test_auto_is_bf16_on_gpus_and_fp32_elsewhere(wanted, device, precision):
    assert choose_precision(wanted, device) == precision


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Some GPU 9000", None),
    ],
)
def test_the_peak_is_told_of_known_devices_only(name, bf16):
    assert peak_flops(name, "bf16", has_tf32=True) == bf16
    assert peak_flops(name, "fp32", has_tf32=False) is None


def test_fp32_has_the_peak_of_tf32_where_that_is_allowed():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", has_tf32=True) == 156e12


def test_who_wants_to_compile_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentFault) as caught:
        require_compiler("cpu")
    assert str(caught.value) == (
        "node.compile needs a C++ compiler, and there is no no-such-compiler; install one or name it in CXX, or set "
        "node.compile to false"
    )

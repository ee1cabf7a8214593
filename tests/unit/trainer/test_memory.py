# SPDX-License-Identifier: Apache-2.0
"""What a run needs is said beforehand; against a real daemon in tests/multiprocess/test_run_memory.py."""

import contextlib
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.optim.registry import outer_types
from isthmus.trainer.config.base_model import num_frozen
from isthmus.trainer.config.job import ActivationCheckpointing
from isthmus.trainer.config.memory import Needs, least_needs_of, needs_of
from isthmus.trainer.config.outer_method import fragment_table
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.config.worker_memory import block_nbytes
from isthmus.trainer.errors import EnvironmentFault
from isthmus.trainer.model.decoder import preset
from isthmus.trainer.run import room
from isthmus.trainer.run.room import Room, misfit, require_room
from isthmus.trainer.workers.blocks import prepare_blocks

PROGRAM_NBYTES = 400 << 20


def config_of(**values: object) -> Config:
    return load_config(overrides=[Override(key, str(value), key) for key, value in values.items()]).config


def copies(needs: Needs, config: Config) -> float:
    """Of the fp32 parameters, in a daemon, beyond its program."""
    return (needs.daemon - PROGRAM_NBYTES) / (4 * fragment_table(config.model).numel)


@pytest.mark.parametrize(
    ("outer", "measured"),
    [
        ({}, 5.5),
        ({"outer.type": "streaming", "outer.num_fragments": "2"}, 4.8),
        ({"outer.type": "streaming", "outer.num_fragments": "4"}, 3.9),
    ],
)
def test_a_daemon_needs_what_scripts_bench_memory_has_measured(outer: dict[str, object], measured: float) -> None:
    config = config_of(**{"model.preset": "150m", "inner.type": "sgd", **outer})
    assert copies(needs_of(config, on_gpu=False), config) == pytest.approx(measured, rel=0.03)


def test_moments_are_copied_for_the_disk(tmp_path: Path) -> None:
    sgd, adamw = (config_of(**{"model.preset": "150m", "inner.type": kind}) for kind in ("sgd", "adamw"))
    copy = 4 * fragment_table(sgd.model).numel
    one, other = needs_of(sgd, on_gpu=False), needs_of(adamw, on_gpu=False)
    assert other.daemon - one.daemon == 2 * copy
    assert other.disk - one.disk == 2 * copy * (sgd.checkpoint.keep + 1)


@pytest.mark.parametrize("name", outer_types())
def test_every_method_says_what_it_needs(name: str) -> None:
    config = config_of(**{"outer.type": name, "inner.type": "sgd" if name == "demo" else "adamw"})
    copy = 4 * fragment_table(config.model).numel
    needs = needs_of(config, on_gpu=False)
    assert 3 * copy < needs.daemon - PROGRAM_NBYTES < 30 * copy
    assert needs.disk > 4 * copy


@pytest.mark.parametrize("outer", [{"outer.type": "sparseloco"}, {"outer.type": "async"}, {"outer.guard": "trimmed"}])
def test_who_reads_the_payloads_of_all_needs_a_copy_for_each_peer(outer: dict[str, str]) -> None:
    three, eight = (
        config_of(**{"model.preset": "150m", "members.start_peers": number, "run.outer_steps": 100, **outer})
        for number in (3, 8)
    )
    more = copies(needs_of(eight, on_gpu=False), eight) - copies(needs_of(three, on_gpu=False), three)
    assert 5.0 < more < 8.0


def test_more_gpus_take_less_each_and_a_smaller_micro_batch_too() -> None:
    one = needs_of(config_of(**{"model.preset": "150m"}), on_gpu=True)
    assert one.device > needs_of(config_of(**{"model.preset": "150m", "node.local_workers": 4}), on_gpu=True).device
    assert one.device > needs_of(config_of(**{"model.preset": "150m", "node.micro_batch": 2}), on_gpu=True).device
    assert needs_of(config_of(), on_gpu=False).device == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", ["none", "full"])
@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_a_block_keeps_what_is_said(name: str, keep: ActivationCheckpointing, dtype: torch.dtype) -> None:
    """Bytes of the tensors that autograd holds on to, of two blocks more."""

    def kept_nbytes(num_layers: int) -> int:
        model = preset(name, num_layers=num_layers).build()
        prepare_blocks(model.blocks, keep=keep, is_compiled=False)
        model.to_empty(device="cpu").to(dtype)
        model.init_buffers(torch.device("cpu"))
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        owned = [*model.parameters(), *model.rotary.on(torch.device("cpu"))]
        known = {tensor.untyped_storage().data_ptr() for tensor in owned}
        held: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.zeros((1, model.max_seq_len), dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, tokens)
        return sum(one.untyped_storage().nbytes() for place, one in held.items() if place not in known)

    shape = preset(name)
    measured = (kept_nbytes(4) - kept_nbytes(2)) / (2 * shape.max_seq_len)
    assert block_nbytes(shape, dtype.itemsize, keep) == pytest.approx(measured, rel=0.01)


def test_who_computes_more_again_or_in_bf16_needs_less() -> None:
    def device_nbytes(**node: str) -> int:
        keys = {f"node.{key}": value for key, value in node.items()}
        return needs_of(config_of(**{"model.preset": "150m", **keys}), on_gpu=True).device

    none, selective, full = (device_nbytes(activation_checkpointing=keep) for keep in ("none", "selective", "full"))
    assert none > 1.5 * selective
    assert selective > 1.5 * full
    assert device_nbytes(precision="fp32") > 1.5 * none
    assert device_nbytes(precision="bf16") == none


@pytest.mark.parametrize(("micro_batch", "is_begun"), [("auto", True), ("16", False)])
def test_a_run_that_fits_with_smaller_micro_batches_is_begun_where_workers_may_halve_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, micro_batch: str, is_begun: bool
) -> None:
    config = config_of(**{"node.device": "cpu", "node.micro_batch": micro_batch, "model.preset": "150m"})
    least = least_needs_of(config_of(**{"model.preset": "150m"}), on_gpu=False)
    free = (needs_of(config, on_gpu=False).host + least.host) // 2
    monkeypatch.setattr(room, "memory_nbytes", lambda: (2 * free, free))
    with contextlib.nullcontext() if is_begun else pytest.raises(EnvironmentFault, match="of memory here"):
        require_room(config, tmp_path, has_loop=False)
    assert ("memory_is_tight" in caplog.text) == is_begun


def test_of_a_hugging_face_model_what_is_frozen_is_in_the_workers_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    told = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, **sizes}
    (folder / "config.json").write_text(json.dumps(told))

    def needs(**values: object) -> tuple[Needs, Config]:
        config = config_of(**{"model.type": "hf", "model.path": folder, "model.seq_len": 64, **values})
        return needs_of(config, on_gpu=False), config

    (whole, _), (adapted, config) = needs(), needs(**{"model.lora.rank": 4})
    assert adapted.daemon < whole.daemon - 5 * 4 * num_frozen(config) * 0.9
    assert adapted.workers > 4 * num_frozen(config)
    assert needs(**{"model.lora.rank": 4, "node.activation_checkpointing": "full"})[0].workers < adapted.workers


NEEDS = Needs(daemon=3 * 10**9, workers=10**9, device=5 * 10**9, disk=2 * 10**9)


@pytest.mark.parametrize(
    ("free", "named"),
    [
        (Room(host=4 * 10**9, device=5 * 10**9, disk=2 * 10**9), None),
        (Room(host=4 * 10**9, device=None, disk=2 * 10**9), None),
        (Room(host=4 * 10**9 - 1, device=5 * 10**9, disk=2 * 10**9), "4 GB of memory here"),
        (Room(host=4 * 10**9, device=10**9, disk=2 * 10**9), "5 GB of each GPU's memory here, and 1 GB"),
        (Room(host=4 * 10**9, device=5 * 10**9, disk=10**9), "2 GB of disk here"),
    ],
)
def test_what_does_not_fit_is_named_with_both_numbers(free: Room, named: str | None) -> None:
    found = misfit(NEEDS, free)
    assert (found is None) == (named is None)
    assert found is None or named is None or named in found[0].replace(".0 GB", " GB")


def test_a_peer_does_not_begin_where_its_run_cannot_fit_unless_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO", "isthmus")
    require_room(config_of(**{"node.device": "cpu"}), tmp_path, has_loop=False)
    assert "this_run_needs memory=" in caplog.text
    monkeypatch.setattr(room, "memory_nbytes", lambda: (10**9, 10**8))
    with pytest.raises(EnvironmentFault, match=r"of memory here, and .* are free.*--ignore-memory") as refused:
        require_room(config_of(**{"node.device": "cpu"}), tmp_path, has_loop=False)
    assert refused.value.exit_code == 3
    require_room(config_of(**{"node.device": "cpu", "node.ignore_memory": "true"}), tmp_path, has_loop=False)
    assert "does_not_fit" in caplog.text


def test_a_peer_that_comes_back_is_not_kept_out_by_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    config = config_of(**{"node.device": "cpu"})
    needed = needs_of(config, on_gpu=False).disk
    free = namedtuple("usage", "free")(needed - 1000)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: free)
    with pytest.raises(EnvironmentFault, match="of disk here"):
        require_room(config, tmp_path, has_loop=False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "state").write_bytes(bytes(1000))
    require_room(config, tmp_path, has_loop=False)
    assert "does_not_fit" not in caplog.text, "newer checkpoints take the place of those that are there"
    (tmp_path / "checkpoints" / "state").write_bytes(bytes(10))
    require_room(config, tmp_path, has_loop=False)
    assert "does_not_fit" in caplog.text

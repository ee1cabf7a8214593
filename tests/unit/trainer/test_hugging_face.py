# SPDX-License-Identifier: Apache-2.0
"""Models of transformers as a worker trains them: the same numbers, names and buffers; only what is trained moves."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from isthmus.optim.fragments import FragmentTable
from isthmus.trainer.config.job import OptimizerJob, ScheduleJob, TrainingJob
from isthmus.trainer.errors import ConfigError
from isthmus.trainer.model.hugging_face import HuggingFaceModelConfig
from isthmus.trainer.model.language_model import LanguageModel
from isthmus.trainer.model.lora import Lora
from isthmus.trainer.model.model_folder import read_architecture, weights_digest
from isthmus.trainer.workers.inner_loop import InnerLoop
from isthmus.trainer.workers.sharded_model import sharded_model
from isthmus.trainer.workers.shards import ShardMap
from tests.unit.trainer.tiny_models import SHAPES, tiny_model

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 256
TARGETS = TOKENS.roll(-1, 1)
TEXT = np.frombuffer(b"Peers come and go; the run goes on. " * 40, dtype=np.uint8)
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def described(folder: Path, *, lora: Lora | None = None, freeze: tuple[str, ...] = ()) -> HuggingFaceModelConfig:
    return HuggingFaceModelConfig(
        architecture=read_architecture(folder), folder=str(folder), lora=lora, freeze=freeze, seq_len=12
    )


def on_a_worker(config: HuggingFaceModelConfig, mesh: DeviceMesh) -> LanguageModel:
    """As a worker has it after the founder's first parameters are loaded."""
    model = sharded_model(config, mesh=mesh, precision="fp32")
    table = FragmentTable.from_named_shapes(config.named_shapes())
    ShardMap.build(model.trained_parameters(), table).read(config.initial_parameters(0), (), keep=0.0)
    return model.eval()


@pytest.mark.parametrize("kind", SHAPES)
def test_a_worker_computes_what_transformers_computes(kind: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    reference = tiny_model(kind, tmp_path)
    model = on_a_worker(described(tmp_path), mesh)
    with torch.no_grad():
        expected = reference(TOKENS).logits
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-6)
    loss = model(TOKENS, TARGETS)
    torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), TARGETS.flatten()), rtol=1e-5, atol=1e-6)
    loss.backward()
    F.cross_entropy(reference(TOKENS).logits.flatten(0, 1), TARGETS.flatten()).backward()
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.trained_parameters():
        assert parameter.grad is not None
        assert grads[name] is not None
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)
    kept = dict(reference.named_buffers())
    buffers = {name.removeprefix("network."): one for name, one in model.named_buffers()}
    assert buffers.keys() == kept.keys()
    for name, buffer in kept.items():
        assert torch.equal(buffers[name], buffer), name


def test_a_tied_weight_is_trained_once_under_its_first_name(tmp_path: Path) -> None:
    reference = tiny_model("qwen3", tmp_path)
    names = [name for name, _ in described(tmp_path).named_shapes()]
    assert names == [name for name, _ in reference.named_parameters()]
    assert "lm_head.weight" not in names
    assert len(set(names)) == len(names)


def test_adapters_begin_at_the_base_model_and_are_all_that_is_trained(tmp_path: Path, mesh: DeviceMesh) -> None:
    reference = tiny_model("llama", tmp_path)
    config = described(tmp_path, lora=LORA)
    model = on_a_worker(config, mesh)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=1e-5, atol=1e-6)
    shapes = dict(config.named_shapes())
    assert len(shapes) == 2 * 2 * 2
    assert shapes["model.layers.1.self_attn.v_proj.lora_A"] == (4, 32)
    assert shapes["model.layers.1.self_attn.v_proj.lora_B"] == (16, 4)
    assert config.frozen_shapes() == [(name, tuple(one.shape)) for name, one in reference.named_parameters()]
    model(TOKENS, TARGETS).backward()
    frozen = [one for one in model.parameters() if not one.requires_grad]
    assert all(one.grad is None for one in frozen)
    assert all(one.grad is not None and one.grad.isfinite().all() for _, one in model.trained_parameters())


def test_an_adapter_adds_its_product_to_what_its_layer_makes(tmp_path: Path, mesh: DeviceMesh) -> None:
    reference = tiny_model("llama", tmp_path)
    config = described(tmp_path, lora=LORA)
    model = on_a_worker(config, mesh)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.trained_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values)
            layer, _, half = name.rpartition(".")
            if half == "lora_A":
                a = values
            else:
                reference.get_parameter(f"{layer}.weight").add_(8.0 / 4 * values @ a)
        torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_are_read_and_not_trained(tmp_path: Path, mesh: DeviceMesh) -> None:
    reference = tiny_model("qwen3", tmp_path)
    config = described(tmp_path, freeze=("model.embed_tokens.*", "*norm.weight"))
    assert config.needs_folder
    assert not described(tmp_path).needs_folder
    trained = {name for name, _ in config.named_shapes()}
    assert trained == {
        name for name, _ in reference.named_parameters() if "embed" not in name and not name.endswith("norm.weight")
    }
    model = on_a_worker(config, mesh)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), reference(TOKENS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_training_step_moves_only_what_is_trained(tmp_path: Path, mesh: DeviceMesh, lora: Lora | None) -> None:
    tiny_model("qwen3", tmp_path)
    config = described(tmp_path, lora=lora)
    job = TrainingJob(
        model=config, seq_len=12, data_seed=3, optimizer=OptimizerJob(lr=1e-2), schedule=ScheduleJob(total_steps=20),
        micro_batch=4, eval_batch=3, num_eval_batches=4,
    )  # fmt: skip
    job = msgspec.json.decode(msgspec.json.encode(job), type=TrainingJob)  # as a worker gets it
    loop = InnerLoop(job, mesh=mesh, train=TEXT[:1000], validation=TEXT[1000:])
    first = config.initial_parameters(0)
    assert loop.numel == first.numel() == sum(math.prod(shape) for _, shape in config.named_shapes())
    loop.load(first)
    before = loop.judge.evaluate()[0]
    for inner_step in range(1, 21):
        loop.step(range(4 * inner_step, 4 * inner_step + 4), inner_step)
    assert loop.judge.evaluate()[0] < before - 0.5
    mailbox = torch.full((loop.numel,), torch.nan)
    loop.store(mailbox)
    assert not torch.equal(mailbox, first)


def test_with_bf16_what_is_frozen_is_kept_in_it_and_what_is_trained_is_not(tmp_path: Path, mesh: DeviceMesh) -> None:
    reference = tiny_model("llama", tmp_path)
    config = described(tmp_path, lora=LORA)
    model = sharded_model(config, mesh=mesh, precision="bf16")
    table = FragmentTable.from_named_shapes(config.named_shapes())
    ShardMap.build(model.trained_parameters(), table).read(config.initial_parameters(0), (), keep=0.0)
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}
    assert {one.dtype for _, one in model.trained_parameters()} == {torch.float32}
    loss = model(TOKENS, TARGETS)
    with torch.no_grad():
        expected = F.cross_entropy(reference(TOKENS).logits.flatten(0, 1), TARGETS.flatten())
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0.0)
    loss.backward()
    assert {one.grad.dtype for _, one in model.trained_parameters() if one.grad is not None} == {torch.float32}


def test_the_first_parameters_are_the_folders_and_adapters_follow_from_the_seed(tmp_path: Path) -> None:
    reference = tiny_model("llama", tmp_path)
    flat = torch.cat([one.detach().flatten() for one in reference.parameters()])
    assert torch.equal(described(tmp_path).initial_parameters(0), flat)
    adapters = described(tmp_path, lora=LORA)
    assert torch.equal(adapters.initial_parameters(3), adapters.initial_parameters(3))
    assert not torch.equal(adapters.initial_parameters(3), adapters.initial_parameters(4))


def test_weights_in_several_files_are_read_one_by_one(tmp_path: Path) -> None:
    reference = tiny_model("llama", tmp_path / "one")
    reference.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    assert torch.equal(
        described(tmp_path / "several").initial_parameters(0), described(tmp_path / "one").initial_parameters(0)
    )


def test_half_precision_weights_are_trained_in_full_precision(tmp_path: Path) -> None:
    reference = tiny_model("llama", tmp_path / "fp32")
    reference.bfloat16().save_pretrained(tmp_path / "bf16")
    first = described(tmp_path / "bf16").initial_parameters(0)
    assert first.dtype == torch.float32
    assert torch.equal(first, torch.cat([one.detach().float().flatten() for one in reference.parameters()]))


def test_the_digest_names_the_weights_and_nothing_else(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path / "a")
    tiny_model("llama", tmp_path / "b")
    tiny_model("llama", tmp_path / "c", seed=1)
    (tmp_path / "b" / "README.md").write_text("a copy")
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b") != weights_digest(tmp_path / "c")


def test_flops_count_products_and_spare_what_is_frozen(tmp_path: Path) -> None:
    reference = tiny_model("llama", tmp_path)
    sizes = {name: one.numel() for name, one in reference.named_parameters()}
    products = sum(size for name, size in sizes.items() if "norm" not in name and "embed" not in name)
    attention = 12 * 2 * 32 * 12
    assert described(tmp_path).num_flops_per_token(12) == 6 * products + attention
    adapters = described(tmp_path, lora=LORA)
    trained = sum(math.prod(shape) for _, shape in adapters.named_shapes())
    assert adapters.num_flops_per_token(12) == 4 * products + 6 * trained + attention


def test_sequences_are_bounded_by_what_the_model_reads(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    config = described(tmp_path)
    assert msgspec.structs.replace(config, seq_len=None).max_seq_len == 64
    with pytest.raises(ConfigError, match="reads 64 tokens"):
        _ = msgspec.structs.replace(config, seq_len=65).max_seq_len
    long = tiny_model("llama", tmp_path / "long", max_position_embeddings=4096)
    assert long.config.max_position_embeddings == 4096
    assert msgspec.structs.replace(described(tmp_path / "long"), seq_len=None).max_seq_len == 1024


# -------------------------------------------------------------------------------------------------------- refusals


def test_folders_that_hold_no_such_model_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_architecture(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_architecture(tmp_path)
    for content, problem in (
        ("{", "is not JSON"),
        ("[]", "is not a model's config"),
        ('{"a": 1}', "says no model_type"),
        ('{"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config"}}', "has no code for"),
        ('{"model_type": "llama", "quantization_config": {}}', "is quantized"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "has 1000000000 layers"),
        (json.dumps({"model_type": "llama", "note": "x" * 20_000}), "more than 16384"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            read_architecture(tmp_path)


def test_weights_that_are_not_the_models_are_told(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    weights = tmp_path / "model.safetensors"
    whole: dict[str, Tensor] = load_file(weights)
    save_file(whole | {"model.norm.weight": torch.ones(31)}, weights)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has the shape \(31,\), not \(32,\)"):
        described(tmp_path).initial_parameters(0)
    save_file({name: one for name, one in whole.items() if name != "model.norm.weight"}, weights)
    with pytest.raises(ConfigError, match=r"are not of its config\.json"):
        described(tmp_path).initial_parameters(0)
    weights.write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="not safetensors"):
        described(tmp_path).initial_parameters(0)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        described(tmp_path).initial_parameters(0)


def test_patterns_that_name_nothing_are_told(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="no parameter is called so"):
        described(tmp_path, freeze=("embed",)).named_shapes()
    with pytest.raises(ConfigError, match="freezes everything"):
        described(tmp_path, freeze=("*",)).named_shapes()
    with pytest.raises(ConfigError, match="there are down_proj, gate_proj, k_proj"):
        described(tmp_path, lora=Lora(rank=2, alpha=1.0, targets=("query",))).named_shapes()

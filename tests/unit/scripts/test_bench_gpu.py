# SPDX-License-Identifier: Apache-2.0
"""scripts/bench gpu without a GPU: its code, its order and its ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import bench_gpu

ROOT = Path(__file__).parents[3]


def run(tmp_path, *words):
    """(exit code, what the file holds)."""
    path = tmp_path / "gpu.json"
    code = bench_gpu.main([*words, "--json", str(path)])
    return code, json.loads(path.read_text()) if path.exists() else None


def test_the_parts_that_need_torch_alone_run_on_a_cpu_and_tell_their_figures(tmp_path, capsys):
    code, told = run(tmp_path, "--device", "cpu", "--presets", "tiny", "--parts", "machine", "codecs", "copies")
    assert code == 0
    assert list(told["parts"]) == ["machine", "codecs", "copies"]
    assert told["parts"]["machine"]["torch"] == torch.__version__
    assert told["parts"]["machine"]["device"] == "cpu"
    codecs = told["parts"]["codecs"]["codecs"]
    assert codecs.keys() == {"bf16", "int8", "e3m0", "twobit", "topk"}
    for row in codecs.values():
        assert row["same_bytes"]
        assert row["same_values"]
        assert row["encode_gb_s"] > 0
    assert told["parts"]["copies"]["shards"]["store_gb_s"] > 0
    assert "device_way_gb_s" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_it_ends_with_3_and_one_sentence(tmp_path, capsys):
    assert run(tmp_path) == (3, None)
    assert capsys.readouterr().err == (
        "bench gpu: this machine has no CUDA device; --device cpu runs the same code without one\n"
    )


def test_a_part_that_is_not_done_in_time_is_ended_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(bench_gpu, "_LIMITS_S", {**bench_gpu._LIMITS_S, "codecs": 1.5 / 4})
    code, told = run(tmp_path, "--device", "cpu", "--presets", "tiny", "--parts", "codecs", "machine")
    assert code == 1
    assert told["parts"]["codecs"]["error"] == "not done after 2 s"
    assert not told["parts"]["codecs"]["ok"]
    assert told["parts"]["machine"]["device"] == "cpu"
    assert capfd.readouterr().err == "bench gpu: not well: codecs\n"


def test_what_comes_after_the_time_is_over_is_left_out(tmp_path):
    code, told = run(tmp_path, "--device", "cpu", "--presets", "tiny", "--parts", "machine", "--minutes", "0.01")
    assert code == 0
    assert told["parts"] == {"machine": {"left_out": "no time was left"}}


def test_a_part_whose_package_is_missing_names_it(tmp_path):
    told = tmp_path / "part.json"
    hidden = "import sys; sys.modules['msgspec'] = None; from scripts.bench_gpu import main; main()"
    words = ["--part", "training", "--device", "cpu", "--presets", "tiny", "--json", str(told)]
    subprocess.run([sys.executable, "-c", hidden, *words], cwd=ROOT, check=True, timeout=60)
    assert json.loads(told.read_text()) == {"left_out": "msgspec is not installed"}


def test_a_worker_and_a_bare_loop_are_timed_in_turns(tmp_path):
    code, told = run(tmp_path, "--device", "cpu", "--presets", "tiny", "--parts", "training")
    assert code == 0
    figures = told["parts"]["training tiny"]
    assert figures["precision"] == "fp32"
    assert figures["worker_tokens_per_s"] > 0
    assert figures["bare_tokens_per_s"] > 0
    assert len(figures["ratios"]) == 5
    assert figures["ratio"] == figures["ratios"][2]


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_outer_steps_are_timed_in_real_daemons(tmp_path):
    code, told = run(tmp_path, "--device", "cpu", "--presets", "tiny", "--parts", "outer")
    assert code == 0
    figures = told["parts"]["outer"]
    for peers in ("alone", "pair"):
        assert figures[peers]["outer_steps"] == 4
        assert figures[peers]["inner_steps_s"] > 0
        assert figures[peers]["outer_step_s"] > 0
        assert figures[peers]["losses"][-1] < figures[peers]["losses"][0]
    assert figures["pair"]["sent_mb"] > 0.5

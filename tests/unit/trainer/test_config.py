# SPDX-License-Identifier: Apache-2.0
"""Configuration: layers, origins, the sentences for every mistake, the run manifest."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from isthmus.optim.schedule import Schedule, build_schedule
from isthmus.trainer.config.keys import DEFAULTS, KNOWN_KEYS
from isthmus.trainer.config.manifest import config_of, manifest_diff, manifest_digest, manifest_of, manifest_sections
from isthmus.trainer.config.outer import outer_section
from isthmus.trainer.config.outer_method import fragment_table, pace_of
from isthmus.trainer.config.quantities import (
    format_nbytes,
    format_rate,
    format_seconds,
    parse_count,
    parse_nbytes,
    parse_rate,
    parse_seconds,
)
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.show import as_json_text, as_template, as_toml, entries
from isthmus.trainer.config.sources import Override, ResolvedConfig, load_config
from isthmus.trainer.config.training import ConstantSchedule, LoopModelSection, RunSection, Sgd, WsdSchedule
from isthmus.trainer.config.values import shaped
from isthmus.trainer.config.wiring import outer_of
from isthmus.trainer.errors import ConfigError, ExitCode, Refused

REPOSITORY = Path(__file__).parents[3]


def given(*flags: tuple[str, str]) -> list[Override]:
    return [Override(key, text, f"--{key}") for key, text in flags]


def load(*flags: tuple[str, str], **kwargs: object) -> ResolvedConfig:
    return load_config(overrides=given(*flags), **kwargs)


def digest_of(*flags: tuple[str, str]) -> bytes:
    return manifest_digest(manifest_of(load(*flags).config))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def schedule_of(config: Config) -> Schedule:
    schedule = config.inner.schedule
    return build_schedule(
        schedule.type,
        total_steps=pace_of(config).total_inner_steps,
        warmup_steps=pace_of(config).warmup_steps,
        decay_steps=pace_of(config).decay_steps if isinstance(schedule, WsdSchedule) else None,
    )


# ------------------------------------------------------------------------------------------------------------- layers


def test_later_layers_win_key_by_key_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    first = write(tmp_path, "a.toml", "[inner]\nlr = 0.1\nbatch_size = 4\ngrad_clip = 2.0\n[run]\nseed = 1\n")
    second = write(tmp_path, "b.toml", "[inner]\nlr = 0.2\nbatch_size = 5\n")
    manifest = manifest_of(Config(run=RunSection(name="resumed", seed=9)))

    resolved = load_config(
        files=[first, second],
        environ={"ISTHMUS__INNER__BATCH_SIZE": "6", "ISTHMUS__EVAL__BATCHES": "3", "PATH": "/bin"},
        overrides=given(("eval.batches", "2")),
        manifest=manifest,
    )

    config, origins = resolved.config, resolved.origins
    assert (config.run.name, origins["run.name"]) == ("resumed", "run manifest")
    assert (config.run.seed, origins["run.seed"]) == (1, str(first))
    assert (config.inner.grad_clip, origins["inner.grad_clip"]) == (2.0, str(first))
    assert (config.inner.lr, origins["inner.lr"]) == (0.2, str(second))
    assert (config.inner.batch_size, origins["inner.batch_size"]) == (6, "ISTHMUS__INNER__BATCH_SIZE")
    assert (config.eval.batches, origins["eval.batches"]) == (2, "--eval.batches")
    assert origins["outer.momentum"] == "run manifest"
    assert origins["node.listen"] == "default"


def test_every_known_key_has_an_origin() -> None:
    config = load()
    assert set(config.origins) <= set(KNOWN_KEYS)
    # What is not told belongs to a variant that was not chosen.
    of_methods = {key for key, tags in KNOWN_KEYS.items() if "diloco" not in tags.get("outer", {"diloco"})}
    assert {f"outer.{name}" for name in ("num_fragments", "pattern", "delay", "keep", "topk")} < of_methods
    others = {"inner.momentum", "inner.omegas", "inner.schedule.decay_steps", "inner.states", "model.parameters"}
    of_hugging_face = {key for key, tags in KNOWN_KEYS.items() if tags.get("model") == {"hf"}}
    assert {"model.path", "model.freeze", "model.lora.rank", "model.weights_digest"} < of_hugging_face
    assert set(KNOWN_KEYS) - set(config.origins) == others | of_methods | of_hugging_face


def test_the_last_of_two_equal_flags_wins() -> None:
    assert load(("run.seed", "1"), ("run.seed", "2")).config.run.seed == 2


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("run.name", "123", "123"),
        ("run.name", "true", "true"),
        ("run.name", "1e5", "1e5"),
        ("inner.lr", "3e-4", 3e-4),
        ("inner.lr", ".5", 0.5),
        ("inner.lr", "1", 1.0),
        ("inner.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("model.tie_embeddings", "false", False),
        ("model.tie_embeddings", "none", None),
        ("data.path", "/x/1", Path("/x/1")),
        ("data.path", "12", Path("12")),
        ("metrics.port", "none", None),
        ("run.outer_steps", "3k", 3000),
    ],
)
def test_text_of_a_shell_becomes_the_type_that_the_key_has(key: str, text: str, expected: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load((key, text)).config, section), name) == expected
    variable = f"ISTHMUS__{section.upper()}__{name.upper()}"
    from_environment = load_config(environ={variable: text}).config
    assert getattr(getattr(from_environment, section), name) == expected


# ----------------------------------------------------------------------------------------------------------- variants


def test_switching_a_variant_forgets_what_lower_layers_said_for_the_other(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", '[inner.schedule]\ntype = "wsd"\ndecay_steps = 7\nwarmup_steps = 3\n')
    assert load(files=[file]).config.inner.schedule == WsdSchedule(decay_steps=7, warmup_steps=3)
    switched = load(("inner.schedule.type", "constant"), files=[file])
    assert switched.config.inner.schedule == ConstantSchedule(warmup_steps=3)
    assert "inner.schedule.decay_steps" not in switched.origins


def test_switching_the_inner_optimizer_keeps_what_both_have(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", "[inner]\nbetas = [0.5, 0.6]\nlr = 0.25\n")
    inner = load(("inner.type", "sgd"), files=[file]).config.inner
    assert isinstance(inner, Sgd)
    assert inner.lr == 0.25


def test_key_of_another_variant_in_the_same_layer_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, "a.toml", '[inner.schedule]\ntype = "constant"\nmin_ratio = 0.5\n')
    with pytest.raises(ConfigError, match=r'min_ratio .* does not belong to .* = "constant"; .* "cosine" or "wsd"'):
        load(files=[file])


def test_key_of_another_variant_than_the_default_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'does not belong to inner\.schedule\.type = "cosine"'):
        load(("inner.schedule.decay_steps", "5"))


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("inner.bach_size", "did you mean inner.batch_size?"),
        ("inner.scedule.type", "did you mean inner.schedule.type?"),
        ("iner.lr", "did you mean inner.lr?"),
        ("inner.learning_rate", "did you mean inner.lr?"),
        ("inner.seq_len", "did you mean model.seq_len?"),
        ("model.n_layer", "did you mean model.num_layers?"),
        ("members.heartbeat_timeout_s", "did you mean members.heartbeat_timeout?"),
        ("outer.steps", "did you mean run.outer_steps?"),
        ("outer.banana", "isthmus config show lists all keys"),
        ("xyzzy", "isthmus config show lists all keys"),
    ],
)
def test_unknown_key_names_its_origin_and_the_closest_key(tmp_path: Path, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load((key, "1"))
    assert str(caught.value) == f"unknown key {key} from --{key}; {suggestion}"
    assert caught.value.exit_code == ExitCode.USAGE

    *tables, leaf = key.split(".")
    file = write(tmp_path, "bad.toml", (f"[{'.'.join(tables)}]\n" if tables else "") + f"{leaf} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(files=[file])
    assert str(caught.value) == f"unknown key {key} from {file}; {suggestion}"
    assert caught.value.origin == str(file)


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ('[inner]\nlr = "fast"', 'inner.lr from {} is "fast", expected a number'),
        ("[inner]\nlr = true", "inner.lr from {} is true, expected a number"),
        ("[inner]\nlr = inf", "inner.lr from {} is Infinity, expected a finite number"),
        ("[inner]\nlr = -1", "inner.lr from {} is -1, expected more than 0.0"),
        ("[inner]\nlr = [1]", "inner.lr from {} is [1], expected a number"),
        ("[inner.lr]\nx = 1", 'inner.lr from {} is {{"x": 1}}, expected a number'),
        ("[run]\nname = 5", "run.name from {} is 5, expected a text in quotes"),
        ("[run]\nname = 'A b'", 'run.name from {} is "A b", expected up to 48 lower-case letters'),
        ("[run]\nouter_steps = 1.5", "run.outer_steps from {} is 1.5, expected a whole number"),
        ("[run]\nouter_steps = 0", "run.outer_steps from {} is 0, expected at least 1"),
        ("[run]\nouter_steps = true", "run.outer_steps from {} is true, expected a whole number"),
        ("[run]\nouter_steps = 2024-01-01", 'run.outer_steps from {} is "2024-01-01", expected a count such as'),
        ("[model]\ntie_embeddings = 1", "model.tie_embeddings from {} is 1, expected true or false"),
        ("[inner]\nbetas = [0.9]", "inner.betas from {} is [0.9], expected a further value"),
        ("[inner]\nbetas = [0.9, 1.0]", "inner.betas from {} is [0.9, 1.0], expected less than 1.0"),
        ("[inner]\nbetas = 0.9", "inner.betas from {} is 0.9, expected a list"),
        (
            "[outer]\ncodec = 'int9'",
            "outer.codec from {} is \"int9\", expected 'raw', 'bf16', 'int8', 'e3m0' or 'twobit'; did you mean int8?",
        ),
        (
            "[inner]\ntype = 'adam'",
            "inner.type from {} is \"adam\", expected 'adamw', 'sgd', 'adopt', 'muon', 'loop'; did you",
        ),
        ("[inner.schedule]\ntype = 'cos'", 'inner.schedule.type from {} is "cos", expected'),
        ("[inner]\nschedule = 'cosine'", "inner.schedule from {} is a section, not a value"),
        ("inner = 3", "inner from {} is a section, not a value; set for example inner.lr"),
        ("[node]\nlisten = 'here'", 'node.listen from {} is "here", expected host:port'),
        ("[node]\nlisten = 'h:70000'", 'node.listen from {} is "h:70000", expected host:port'),
        ("[data]\nlimit = '2 parsec'", 'data.limit from {} is "2 parsec", expected a size such as'),
        ("[data]\nlimit = '0B'", 'data.limit from {} is "0B", expected at least 1'),
        ("[net]\ntls = 'yes'", "net.tls from {} is \"yes\", expected 'auto', 'on' or 'off'"),
        ("[net]\ntls = true", "net.tls from {} is true, expected 'auto', 'on' or 'off'"),
        ("[node]\nmax_upload = '5/s'", 'node.max_upload from {} is "5/s", expected a rate such as'),
        ("[node]\nmax_upload = '100kbit'", 'node.max_upload from {} is "100kbit", expected at least "128kbit"'),
        ("[node]\nmax_download = -1", "node.max_download from {} is -1, expected at least"),
        ("[coordinator]\nstore = 'redis'", "coordinator.store from {} is \"redis\", expected 'sqlite' or 'etcd'"),
        (
            "[coordinator]\nstore = 'etcd'",
            'store = "etcd" needs to know its nodes; add for example etcd =',
        ),
        ("[coordinator]\netcd = ['h:1']", 'etcd is given, but store is "sqlite", a file of one coordinator; add'),
        ("[coordinator]\naddresses = ['h:1']", 'addresses is given, but store is "sqlite"'),
        ("[coordinator]\netcd = 'h:1'", 'coordinator.etcd from {} is "h:1", expected a list'),
        ("[coordinator]\netcd = ['h']", 'coordinator.etcd from {} is ["h"], expected host:port'),
        ("[coordinator]\naddresses = ['h:0']", "expected a port that others can know, not 0"),
        ("[coordinator]\netcd_cert = 'c'", "etcd_cert and etcd_key belong together; give both or none"),
        ("[coordinator]\netcd_cert = 'c'\netcd_key = 'k'", "add etcd_ca"),
        ("[coordinator]\netcd_user = 'u'", "etcd_user and etcd_password_file belong together"),
        ("[net]\nchunk = 5000", "net.chunk from {} is 5000, expected a multiple of 4096"),
        ("[members]\nheartbeat_timeout = 'soon'", 'is "soon", expected a duration such as'),
        ("[members]\nheartbeat_timeout = '1s'", "heartbeat_timeout must be at least twice heartbeat_interval"),
        ("[node]\nmicro_batch = 0", 'node.micro_batch from {} is 0, expected "auto" or a whole number of at least 1'),
        ("[node]\nmicro_batch = 'all'", 'node.micro_batch from {} is "all", expected "auto" or a whole number'),
        ("[inner]\nbetas = [2, 3]", "inner.betas from {} is [2, 3], expected"),
        ("[inner]\ntype = 'adopt'\nbetas = [0.9]", "inner.betas from {} is [0.9], expected 2 values"),
        (
            "[inner]\ntype = 'adopt'\nbetas = [0.9, 0.99, 0.999]",
            "[inner] betas are of 2 first and one second moment, omegas of 1 first; give omegas a weight for each",
        ),
        (
            "[inner]\ntype = 'adopt'\nbetas = [0.9, 0.99, 0.999]\nomegas = [0.5, 0.6]",
            "[inner] omegas are 1.1 in sum; give weights of at most 1",
        ),
        (
            "[outer]\ntype = 'mtdao'\nmomentum_multiples = [1, 3]\n[inner]\ntype = 'adopt'",
            "outer exchanges 'exp_avg_0', which inner.type = 'adopt' does not keep (it keeps exp_avg, exp_avg_sq) "
            "(inner.type from {}); give inner.betas a rate for each first moment that outer exchanges",
        ),
        (
            "[outer]\ntype = 'mtdao'\n[inner]\ntype = 'adopt'\nbetas = [0.9, 0.99, 0.999]\nomegas = [0.4, 0.6]",
            "outer exchanges 'exp_avg', which inner.type = 'adopt' does not keep (it keeps exp_avg_0, exp_avg_1",
        ),
        (
            "[outer]\ntype = 'mtdao'\nmomentum_multiples = [1, 3]",
            "outer exchanges 'exp_avg_0', which inner.type = 'adamw' does not keep (it keeps exp_avg, exp_avg_sq); "
            "take another outer, or inner.type adopt",
        ),
        (
            "[outer]\ntype = 'demo'\n[inner]\ntype = 'adopt'",
            "demo does not fit the model or the run: its inner optimizer must be plain SGD (sgd), not inner.type adopt "
            "(inner.type from {})",
        ),
        ("[inner\n", "{} is not TOML: "),
    ],
)
def test_wrong_value_is_one_sentence_with_key_origin_value_and_what_is_expected(
    tmp_path: Path, toml: str, problem: str
) -> None:
    file = write(tmp_path, "bad.toml", toml)
    with pytest.raises(ConfigError) as caught:
        load(files=[file])
    sentence = str(caught.value)
    assert problem.replace("{}", str(file)).replace("{{", "{").replace("}}", "}") in sentence
    assert "\n" not in sentence
    assert "pydantic" not in sentence


def test_all_mistakes_are_told_at_once_each_with_its_origin_and_cure(tmp_path: Path) -> None:
    file = write(tmp_path, "bad.toml", "[inner]\nlrr = 1\nbatch_size = 'b'\n[inner.schedule]\ndecay_steps = 5\n")
    with pytest.raises(ConfigError) as caught:
        load(("run.seed", "-1"), ("xyzzy", "3"), files=[file])
    assert [(fault.key, str(fault)) for fault in caught.value.faults] == [
        ("inner.lrr", f"unknown key inner.lrr from {file}; did you mean inner.lr?"),
        ("xyzzy", "unknown key xyzzy from --xyzzy; isthmus config show lists all keys"),
        (
            "inner.schedule.decay_steps",
            f'inner.schedule.decay_steps from {file} does not belong to inner.schedule.type = "cosine"; '
            'remove it or set inner.schedule.type to "wsd"',
        ),
        ("inner.batch_size", f'inner.batch_size from {file} is "b", expected a whole number'),
        ("run.seed", "run.seed from --run.seed is -1, expected at least 0"),
    ]
    assert str(caught.value) == "\n".join(map(str, caught.value.faults))


def test_a_flag_with_a_wrong_number_is_told_as_the_number_it_is() -> None:
    with pytest.raises(ConfigError, match=r"^inner.lr from --inner.lr is -1, expected more than 0.0$"):
        load(("inner.lr", "-1"))


@pytest.mark.parametrize("value", ['1\nseed = 2"', "'''", "a\nb", "[", "\x00"])
def test_text_of_a_flag_cannot_smuggle_in_other_keys(value: str) -> None:
    with pytest.raises(ConfigError):
        load(("run.seed", value))


def test_missing_unreadable_and_foreign_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load(files=[tmp_path / "none.toml"])
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(files=[tmp_path])
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(files=[tmp_path / "bytes.toml"])
    (tmp_path / "big.toml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than a configuration can be"):
        load(files=[tmp_path / "big.toml"])


def test_model_that_cannot_be_built_is_told_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"\[model\] cannot be built: .*did you mean 'tiny'"):
        load(("model.preset", "tinny")).config.model.description()
    with pytest.raises(ConfigError, match="not a multiple of num_heads"):
        load(("model.dim", "7")).config.model.description()


@pytest.mark.parametrize(
    "flags",
    [
        [("inner.schedule.warmup_steps", "10")],
        [("inner.schedule.type", "wsd"), ("inner.schedule.warmup_steps", "5"), ("inner.schedule.decay_steps", "6")],
    ],
)
def test_schedule_that_does_not_fit_the_run_is_told(flags: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"^inner\.schedule needs at least 11 inner steps .* but the run has 10 "):
        load(("run.outer_steps", "1"), ("outer.inner_steps", "10"), *flags)
    load(("run.outer_steps", "1"), ("outer.inner_steps", "11"), *flags)


def streaming(**settings: object) -> list[tuple[str, str]]:
    return [("outer.type", "streaming"), *((f"outer.{key}", str(value)) for key, value in settings.items())]


def test_durable_results_need_checkpoints() -> None:
    with pytest.raises(ConfigError, match=r"^members\.durable .* give a checkpoint\.every of at least 1$"):
        load(("members.durable", "true"), ("checkpoint.every", "0"))


def test_diloco_has_no_delay() -> None:
    with pytest.raises(
        ConfigError, match=r'^outer\.delay from .* does not belong to outer\.type = "diloco"; remove it or'
    ):
        load(("outer.delay", "1"))


@pytest.mark.parametrize(
    ("told", "key", "problem"),
    [
        ({"momentum": 1.0}, "momentum", "momentum must be in [0, 1), got 1.0 (outer.momentum from {})"),
        (
            {"inner_steps": 15, "delay": 15},
            "delay",
            "delay must be in [0, inner_steps = 15), got 15 (outer.inner_steps from {}, outer.delay from {})",
        ),
        (
            {"inner_steps": 8, "num_fragments": 9},
            "num_fragments",
            "num_fragments must be in [1, inner_steps = 8], got 9 (outer.inner_steps from {}, "
            "outer.num_fragments from {})",
        ),
        (
            {"num_fragments": 5},
            None,
            "streaming does not fit the model or the run: 5 fragments need as many layers, this model has 4",
        ),
    ],
)
def test_what_the_method_says_of_its_settings_is_told_with_where_they_come_from(
    tmp_path: Path, told: dict[str, object], key: str | None, problem: str
) -> None:
    lines = "\n".join(f"{name} = {value}" for name, value in told.items())
    file = write(tmp_path, "bad.toml", f'[outer]\ntype = "streaming"\n{lines}\n')
    with pytest.raises(ConfigError) as caught:
        load(files=[file])
    assert str(caught.value) == f"[outer] {problem.replace('{}', str(file))}"
    assert caught.value.key == (f"outer.{key}" if key else "outer")
    assert caught.value.origin == (str(file) if key else None)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_joiner_looks_at_the_runs_method_too() -> None:
    manifest = manifest_of(Config(outer=outer_section("streaming")(type="streaming", num_fragments=5)))
    with pytest.raises(ConfigError, match="5 fragments need as many layers"):
        load().adopt(manifest)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_the_length_of_a_run_is_counted_in_the_methods_plan(count: int) -> None:
    config = load(*streaming(inner_steps=10, num_fragments=count), ("model.num_layers", "7")).config
    steps = [step for step in range(1001) if outer_of(config).plan(step)][:100]
    assert steps[-1] == pace_of(config).total_inner_steps
    assert max(after - before for before, after in pairwise([0, *steps])) == pace_of(config).longest_stretch


def test_a_run_without_an_end_has_a_length_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.trainer.config.outer_method._MOST_COUNTED", 20_000)
    config = load(*streaming(inner_steps=7, num_fragments=2), ("run.outer_steps", str(2**40))).config
    assert pace_of(config).total_inner_steps == pytest.approx(2**40 * 7 / 2, rel=1e-3)
    assert pace_of(load(("outer.inner_steps", "3"), ("run.outer_steps", "1T")).config).total_inner_steps == 3 * 10**12


def test_warm_up_and_decay_follow_from_the_length() -> None:
    config = load(("inner.schedule.type", "wsd"), ("run.outer_steps", "6"), ("outer.inner_steps", "50")).config
    pace = pace_of(config)
    assert (pace.total_inner_steps, pace.warmup_steps, pace.decay_steps) == (300, 15, 60)
    assert pace_of(load(("inner.schedule.warmup_steps", "7")).config).warmup_steps == 7
    assert pace_of(Config()).decay_steps == 0


# -------------------------------------------------------------------------------------------------------- good values


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_default_schedule_fits_the_shortest_run(kind: str) -> None:
    config = load(("inner.schedule.type", kind), ("run.outer_steps", "1"), ("outer.inner_steps", "1")).config
    assert 0 < schedule_of(config)(0) <= 1


def test_overrides_of_a_preset_reach_the_decoder() -> None:
    model = load(("model.preset", "nano"), ("model.seq_len", "32"), ("model.num_layers", "2")).config.model
    decoder = model.description()
    assert (decoder.max_seq_len, decoder.num_layers, decoder.hidden_dim) == (32, 2, 344)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_seconds, "30min", 1800.0),
        (parse_seconds, "250ms", 0.25),
        (parse_seconds, "1.5h", 5400.0),
        (parse_seconds, "2 d", 172800.0),
        (parse_seconds, "7", 7.0),
        (parse_nbytes, "64KiB", 65536),
        (parse_nbytes, "1kB", 1000),
        (parse_nbytes, "2GB", 2 * 10**9),
        (parse_count, "3B", 3 * 10**9),
        (parse_count, "1.5M", 1_500_000),
        (parse_count, "500", 500),
        (parse_rate, "20mbit", 2_500_000.0),
        (parse_rate, "20 Mbit/s", 2_500_000.0),
        (parse_rate, "1gbit", 125e6),
        (parse_rate, "9600bit", 1200.0),
        (parse_rate, "6MB", 6e6),
        (parse_rate, "6MB/s", 6e6),
        (parse_rate, "512KiB / s", 524288.0),
        (parse_rate, "1.5MiB", 1.5 * 2**20),
        (parse_rate, "7", 7.0),
    ],
)
def test_quantities_are_read_in_their_units(parse: object, text: str, expected: float) -> None:
    assert callable(parse)
    value = parse(text)
    assert value == expected


@pytest.mark.parametrize("text", ["", "s", "3 weeks", "1e999", "nan", "inf", "1,5h", "--3s", "1.5.5", "0x10"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    for parse in (parse_seconds, parse_nbytes, parse_count, parse_rate):
        with pytest.raises(ValueError, match="expected"):
            parse(text)


@pytest.mark.parametrize("text", ["6Mb", "6mb", "6Mb/s", "6kb", "6Kib", "20mbps", "20 MBps"])
def test_a_rate_that_may_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'"20mbit" \(bits a second\) or "6MB" \(bytes a second\); Mb and mbps could'):
        parse_rate(text)


def test_half_a_byte_is_no_size() -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_nbytes("0.5")


# ------------------------------------------------------------------------------------------------------- run manifest


def test_manifest_holds_everything_but_local_sections_and_reads_back_to_itself() -> None:
    etcd = [("coordinator.store", "etcd"), ("coordinator.etcd", '["127.0.0.1:2379"]')]
    config = load(("node.listen", "127.0.0.1:9"), ("data.path", "/x"), ("members.stall_timeout", "2min"), *etcd).config
    manifest = manifest_of(config)
    assert config.coordinator.etcd == ("127.0.0.1:2379",)
    assert b"node" not in manifest
    assert b"coordinator" not in manifest
    again = config_of(manifest)
    assert manifest_of(again) == manifest
    assert again.members.stall_timeout_s == 120.0
    assert manifest_of(load(manifest=manifest).config) == manifest


def test_manifest_digest_ignores_how_values_were_written_and_sees_every_change() -> None:
    plain = digest_of(("members.stall_timeout", "120"), ("inner.lr", "0.001"))
    fancy = digest_of(("members.stall_timeout", "2min"), ("inner.lr", "1e-3"), ("node.threads", "3"))
    assert plain == fancy
    assert len(plain) == 32
    assert plain != digest_of(("run.seed", "1"))


def test_manifest_is_the_same_bytes_in_another_process() -> None:
    script = (
        "from isthmus.trainer.config.settings import Config; from isthmus.trainer.config.manifest import manifest_of; "
        "print(manifest_of(Config()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        cwd=REPOSITORY,
        env={"PYTHONHASHSEED": "7"},
    )
    assert other.stdout.strip() == repr(manifest_of(Config()))


def test_diff_names_each_field_with_both_values() -> None:
    ours = manifest_of(load(("run.seed", "1"), ("inner.type", "sgd")).config)
    theirs = manifest_of(load(("run.seed", "2")).config)
    assert manifest_diff(ours, theirs) == (
        ("inner.betas", None, [0.9, 0.99]),
        ("inner.eps", None, 1e-8),
        ("inner.moments", None, "fresh"),
        ("inner.type", "sgd", "adamw"),
        ("run.seed", 1, 2),
    )
    assert manifest_diff(ours, ours) == ()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format":2}',
        b'{"format":1,"node":{}}',
        b'{"format":1,"coordinator":{}}',
        b'{"format":1,"run":{"colour":1}}',
        b'{"format":1,"run":{"seed":-1}}',
        b"[" * 50_000,
        b" " * 70_000,
    ],
)
def test_what_is_no_manifest_is_refused(manifest: bytes) -> None:
    with pytest.raises(Refused) as caught:
        manifest_sections(manifest)
    assert caught.value.exit_code == ExitCode.REFUSED


# -------------------------------------------------------------------------------------------------------------- joiner


def test_joiner_adopts_the_run_and_keeps_its_node() -> None:
    manifest = manifest_of(load(("run.seed", "3"), ("run.name", "theirs")).config)
    joined = load(("node.local_workers", "2"), ("run.seed", "3")).adopt(manifest)
    assert joined.config.run.name == "theirs"
    assert joined.config.node.local_workers == 2
    assert manifest_of(joined.config) == manifest
    assert joined.origins["run.name"] == "run manifest"


def test_standby_adopts_the_run_and_keeps_its_store() -> None:
    manifest = manifest_of(load(("run.seed", "3")).config)
    joined = load(("coordinator.store", "etcd"), ("coordinator.etcd", '["h:1", "h:2"]')).adopt(manifest)
    assert joined.config.coordinator.etcd == ("h:1", "h:2")
    assert manifest_of(joined.config) == manifest


def test_joiner_that_wants_another_run_is_refused_with_the_fields() -> None:
    manifest = manifest_of(load(("run.seed", "3")).config)
    with pytest.raises(Refused) as caught:
        load(("run.seed", "4"), ("inner.lr", "0.5"), ("node.threads", "1")).adopt(manifest)
    assert caught.value.fields == ("inner.lr", "run.seed")
    assert "run.seed (here 4 from --run.seed, in the run 3)" in str(caught.value)
    assert caught.value.exit_code == ExitCode.REFUSED


def test_joiner_that_wants_another_variant_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        load(("inner.type", "sgd")).adopt(manifest_of(Config()))
    assert "inner.type" in caught.value.fields


# ------------------------------------------------------------------------------------------------------------- output


def test_printed_toml_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    resolved = load(("inner.schedule.type", "wsd"), ("data.path", '/odd "name"/ü'), ("metrics.port", "none"))
    for with_origin in (False, True):
        file = write(tmp_path, f"{with_origin}.toml", as_toml(resolved, with_origin=with_origin))
        assert load(files=[file]).config == resolved.config
    assert "--metrics.port" in as_toml(resolved, with_origin=True)


def test_the_file_to_begin_with_has_every_key_with_its_meaning_and_its_default(tmp_path: Path) -> None:
    written = as_template()
    file = write(tmp_path, "as_it_is.toml", written)
    assert load(files=[file]).config == Config()
    taken_away = re.sub(r"(?m)^# (?=[a-z0-9_]+ = )", "", written)
    file = write(tmp_path, "all.toml", taken_away)
    resolved = load(files=[file])
    assert resolved.config == Config()
    assert {origin for key, origin in resolved.origins.items() if key in DEFAULTS} == {str(file)}
    assert all(len(line) <= 120 for line in written.splitlines())


def test_every_key_of_every_variant_has_a_meaning() -> None:
    variants = [(inner, "cosine", "diloco") for inner in ("adamw", "sgd", "adopt", "muon")]
    variants += [("adamw", schedule, "streaming") for schedule in ("wsd", "constant")]
    for inner, schedule, outer in variants:
        config = load(("inner.type", inner), ("inner.schedule.type", schedule), ("outer.type", outer)).config
        assert [entry for entry in entries(config) if not entry.meaning.endswith(".")] == []


@pytest.mark.parametrize(
    ("number", "write_it", "read", "text"),
    [
        (604800.0, format_seconds, parse_seconds, "7d"),
        (90.0, format_seconds, parse_seconds, "90s"),
        (0.25, format_seconds, parse_seconds, "250ms"),
        (1 / 3, format_seconds, parse_seconds, str(1 / 3)),
        (1 << 26, format_nbytes, parse_nbytes, "64MiB"),
        (1000, format_nbytes, parse_nbytes, "1000"),
        (0, format_nbytes, parse_nbytes, "0"),
        (2_500_000.0, format_rate, parse_rate, "20mbit"),
    ],
)
def test_a_quantity_is_written_with_its_unit_and_reads_back_as_itself(number, write_it, read, text) -> None:
    assert write_it(number) == text
    assert read(write_it(number)) == number


def test_printed_json_has_a_versioned_schema() -> None:
    shown = json.loads(as_json_text(load(("run.seed", "5"))))
    assert shown["schema"] == "isthmus.config/1"
    assert shown["config"]["run"]["seed"] == 5
    assert shown["origins"]["run.seed"] == "--run.seed"


@pytest.mark.parametrize("name", ["tiny", "nanogpt"])
def test_configs_of_the_repository_are_valid(name: str) -> None:
    config = load(files=[REPOSITORY / "configs" / f"{name}.toml"]).config
    assert config.run.name == name
    assert config.model.description().max_seq_len == config.model.seq_len
    assert schedule_of(config)(0) > 0


# --------------------------------------------------------------------------------------------- loops of people's own

LOOP = (("model.type", "loop"), ("model.parameters", '["embed.weight 256x8", "scale"]'), ("inner.type", "loop"))


def test_a_loops_model_is_names_and_shapes() -> None:
    config = load(*LOOP, ("inner.states", '["exp_avg"]')).config
    assert config.is_loops
    assert isinstance(config.model, LoopModelSection)
    assert config.model.named_shapes() == (("embed.weight", (256, 8)), ("scale", ()))
    assert fragment_table(config.model).numel == 256 * 8 + 1
    assert [shaped(name, shape) for name, shape in config.model.named_shapes()] == list(config.model.parameters)
    assert config_of(manifest_of(config)) == config


@pytest.mark.parametrize("spelt", ["two words 3", "w 3xx4", "w -1", "w 3x", ""])
def test_what_is_no_name_and_shape_is_refused(spelt: str) -> None:
    with pytest.raises(ConfigError, match="expected a name and a shape"):
        load(("model.type", "loop"), ("model.parameters", f'["{spelt}"]'), ("inner.type", "loop"))


def test_a_loop_says_model_and_inner_optimizer_or_neither() -> None:
    with pytest.raises(ConfigError, match="do not go together; a loop of one's own says both itself"):
        load(("inner.type", "loop"))


def test_a_loop_has_its_own_data() -> None:
    with pytest.raises(ConfigError, match=r"has its own data; leave out data\.path and --data"):
        load(*LOOP, ("data.path", "text.txt"))


def test_what_a_loops_optimizer_must_keep_is_told_before_the_run() -> None:
    with pytest.raises(ConfigError, match="outer exchanges 'exp_avg', which the loop's optimizer does not keep"):
        load(*LOOP, ("outer.type", "desloc"))
    states = ("inner.states", '["exp_avg", "exp_avg_sq"]')
    assert load(*LOOP, ("outer.type", "desloc"), states).config.outer.type == "desloc"


def test_a_loops_model_cannot_be_built_here() -> None:
    with pytest.raises(ConfigError, match="which only they can build"):
        load(*LOOP).config.model.description()

# SPDX-License-Identifier: Apache-2.0
"""`isthmus plan`: figures that can be checked by hand. Against real runs: tests/netns/test_plan.py."""

import json
from pathlib import Path

import msgspec
import pytest

from isthmus.collective.codec import codec_named
from isthmus.optim.recommend import Links
from isthmus.optim.registry import outer_types
from isthmus.trainer.cli.app import run
from isthmus.trainer.config.outer import outer_section
from isthmus.trainer.config.outer_method import fragment_table
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.forecast.report import Plan
from isthmus.trainer.forecast.timeline import HOST_S_A_VALUE, timeline

PEERS = 4
LINE = Links(upload=38e6 / 8, download=38e6 / 8, round_trip_s=0.09)
STEP_S = 0.5


def config_of(**values: object) -> Config:
    values = {"members.start_peers": PEERS, "run.outer_steps": 50, "outer.inner_steps": 30, **values}
    return load_config(overrides=[Override(key, str(value), key) for key, value in values.items()]).config


def numel_of(config: Config) -> int:
    return fragment_table(config.model).numel


def exchange_s(numel: int, codec: str = "int8") -> float:
    """Of a mean among four: three quarters out, three quarters in, each twice; two ways of half a round trip."""
    return 1.5 * codec_named(codec).wire_nbytes(numel) / LINE.upload + LINE.round_trip_s


def test_workers_wait_for_the_exchange_the_vote_and_the_host() -> None:
    config = config_of(**{"outer.codec": "int8"})
    line = timeline(config, LINE, STEP_S)
    waiting_s = exchange_s(numel_of(config)) + LINE.round_trip_s + HOST_S_A_VALUE * numel_of(config)
    assert line.typical.sent_nbytes == 1.5 * codec_named("int8").wire_nbytes(numel_of(config))
    assert line.typical.waiting_s == pytest.approx(waiting_s)
    assert line.inner_steps == 50 * 30
    assert line.seconds == pytest.approx(50 * (30 * STEP_S + waiting_s))
    assert line.goodput == pytest.approx(30 * STEP_S / (30 * STEP_S + waiting_s))


def test_an_exchange_that_is_done_before_its_delay_is_over_costs_nothing() -> None:
    streaming = {"outer.type": "streaming", "outer.num_fragments": 2, "outer.delay": 5}
    line = timeline(config_of(**streaming), LINE, STEP_S)
    assert line.typical.exchange_s + 2 * LINE.round_trip_s < 5 * STEP_S
    assert line.typical.waiting_s == 0.0
    assert line.goodput > 0.999  # the last outcome has nothing to hide behind


def test_workers_wait_at_the_end_of_the_delay_and_the_line_rests_until_the_next_payload() -> None:
    slow = Links(upload=1e4, download=1e4, round_trip_s=0.0)
    config = config_of(**{"outer.type": "streaming", "outer.num_fragments": 2, "outer.delay": 5})
    line = timeline(config, slow, STEP_S)
    exchanges_s = line.sent_nbytes / slow.upload + 50 / 2 * HOST_S_A_VALUE * numel_of(config)
    # Fifteen steps from one fragment to the next, of which five go on beside the exchange.
    assert line.seconds == pytest.approx(exchanges_s + 50 * 10 * STEP_S, rel=0.01)


def test_an_exchange_begins_when_the_outer_step_before_is_committed() -> None:
    """Where the workers never rest, the line rests for the vote and the host between two exchanges."""
    values = {"outer.type": "streaming", "outer.num_fragments": 3, "outer.delay": 2, "outer.inner_steps": 3}
    line = timeline(config_of(**values), LINE, 1e-6)
    of_each_s = line.typical.exchange_s + LINE.round_trip_s + HOST_S_A_VALUE * numel_of(config_of()) / 3
    assert line.seconds == pytest.approx(50 * of_each_s, rel=0.02)


def test_a_typical_step_does_not_depend_on_where_a_run_ends() -> None:
    odd, even = (
        timeline(config_of(**{"outer.type": "desloc", "run.outer_steps": steps}), LINE, STEP_S) for steps in (90, 91)
    )
    assert odd.typical.sent_nbytes == pytest.approx(even.typical.sent_nbytes, rel=0.05)
    assert odd.largest.sent_nbytes > odd.typical.sent_nbytes


def test_an_exchange_a_whole_round_late_hides_behind_the_round() -> None:
    assert timeline(config_of(), LINE, STEP_S).typical.waiting_s > 0.0
    assert timeline(config_of(**{"outer.type": "delayed"}), LINE, STEP_S).typical.waiting_s == 0.0


def test_a_gather_sends_every_payload_to_all_and_dense_rounds_are_told_apart() -> None:
    config = config_of(**{"outer.type": "sparseloco"})
    line = timeline(config, LINE, STEP_S)
    assert line.typical.sent_nbytes == 3 * codec_named("topk:64").wire_nbytes(numel_of(config))
    assert line.largest.sent_nbytes == 1.5 * codec_named("e3m0").wire_nbytes(numel_of(config))


def test_the_slower_direction_counts() -> None:
    asymmetric = Links(upload=LINE.upload, download=10 * LINE.upload, round_trip_s=LINE.round_trip_s)
    assert timeline(config_of(), asymmetric, STEP_S) == timeline(config_of(), LINE, STEP_S)


def test_a_long_run_goes_on_as_it_began() -> None:
    short, long = (timeline(config_of(**{"run.outer_steps": steps}), LINE, STEP_S) for steps in (1000, 100_000))
    assert long.seconds == pytest.approx(100 * short.seconds)
    assert (long.inner_steps, long.sent_nbytes) == (100 * short.inner_steps, pytest.approx(100 * short.sent_nbytes))


@pytest.mark.parametrize("method", outer_types())
def test_every_method_has_a_timeline(method: str) -> None:
    sgd = {"inner.type": "sgd"} if method == "demo" else {}
    length = {"outer.inner_steps": 30} if "inner_steps" in outer_section(method).model_fields else {}
    values = {"members.start_peers": PEERS, "run.outer_steps": 60, "outer.type": method, **length, **sgd}
    config = load_config(overrides=[Override(key, str(value), key) for key, value in values.items()]).config
    fast = Links(upload=1e12, download=1e12, round_trip_s=0.0)
    slow, quick = timeline(config, LINE, STEP_S), timeline(config, fast, STEP_S)
    assert slow.inner_steps == quick.inner_steps > 0
    assert slow.sent_nbytes == quick.sent_nbytes > 0
    assert 0.0 < slow.goodput <= quick.goodput <= 1.0
    assert quick.goodput > 0.95


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Types `isthmus plan …`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(["plan", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return typed


def test_people_get_a_page(plan) -> None:
    line = ("--peers", "4", "--link", "38mbit/90ms", "--step", "500ms", "--outer.inner-steps", "30")
    code, out, err = plan(*line)
    assert (code, err) == (0, "")
    told = {line[:14].strip(): line[14:] for line in out.splitlines() if not line.startswith(" ")}
    assert told["run"] == "diloco, int8, 1,016,960 parameters, 4 peers"
    assert told["links"] == "38mbit each way, 90ms there and back"
    assert told["inner step"] == "0.5 s, given"
    assert told["outer step"] == "30 inner steps, 15 s"
    assert told["exchange"] == (
        "1.5 MB sent by each peer, and as much received, in 0.416 s; the workers wait 0.513 s for each"
    )
    assert told["goodput"] == "96.7% of the time goes into inner steps"
    assert "with other numbers of inner steps: 30: 96.7%, 100: 99.0%, 300: 99.7%, 1000: 99.9%" in out
    assert told["to the end"].startswith("100 outer steps, 3,000 inner steps, ")
    assert told["this machine"].startswith("needs ")
    assert "the largest" not in told
    assert told["waits less"].startswith("100.0% with --outer.type streaming --outer.inner-steps 30 ")
    published = "its loss in publications: 0.020 above data parallel's (35M, e3m0, 2 peers, arXiv:2501.18512)"
    assert out.splitlines()[-1].strip() == published


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("38mbit/0ms", "38mbit each way, 0s there and back"),
        ("512KiB/0.25ms", "524288 bytes a second each way, 0.00025s there and back"),
    ],
)
def test_quantities_have_units_whatever_was_typed(plan, link: str, told: str) -> None:
    code, out, _ = plan("--peers", "2", "--link", link, "--step", "1s")
    assert (code, out.splitlines()[1]) == (0, f"links         {told}")


def test_programs_get_the_same(plan) -> None:
    code, out, _ = plan(
        "--peers", "4", "--link", "38mbit/90ms", "--step", "0.5", "--json", "--outer.type", "sparseloco"
    )
    assert code == 0
    told = msgspec.json.decode(out, type=Plan, strict=True)
    assert told.schema == "isthmus.plan/1"
    assert (told.largest.codec, told.typical.codec) == ("e3m0", "topk:64")
    assert told.largest.sent_nbytes > told.typical.sent_nbytes
    assert {need.name for need in told.needs} == {"memory", "disk"}


def test_a_cap_on_the_line_counts(plan) -> None:
    flags = ("--peers", "2", "--link", "100mbit/20ms", "--step", "1s", "--json", "--max-upload", "10mbit")
    told = json.loads(plan(*flags)[1])
    assert (told["upload_bytes_per_s"], told["download_bytes_per_s"]) == (1.25e6, 12.5e6)


def test_a_plan_for_machines_that_are_not_here(plan) -> None:
    code, out, _ = plan("--peers", "2", "--link", "1gbit/0ms", "--step", "1s", "--device", "cuda", "--json")
    assert code == 0
    needs = {need["name"]: need for need in json.loads(out)["needs"]}
    assert needs["each GPU"]["nbytes"] > 0


def test_what_is_named_as_better_can_be_typed_and_is_better(plan) -> None:
    flags = ("--peers", "4", "--link", "38mbit/90ms", "--step", "10ms", "--outer.inner-steps", "30", "--json")
    told = json.loads(plan(*flags)[1])
    better = told["better"]
    assert better["goodput"] > told["goodput"] + 0.02
    again = json.loads(plan(*flags, *better["flags"].split())[1])
    assert again["goodput"] == pytest.approx(better["goodput"], abs=0.01)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--peers", "4"], "nothing is known of the links; say rate and round trip, as --link 38mbit/90ms"),
        (["--peers", "4", "--link", "38mbit"], "--link '38mbit' has no round trip"),
        (["--peers", "4", "--link", "fast/90ms"], "--link: 'fast' cannot be read; expected a rate such as"),
        (["--peers", "4", "--link", "0mbit/90ms"], "--link: '0mbit' is not possible; give a number above zero"),
        (["--peers", "4", "--link", "1mbit/90ms", "--step", "soon"], "--step: 'soon' cannot be read"),
        (["--peers", "4", "--link", "1mbit/90ms", "--step", "1e308d"], "--step: '1e308d' is not possible"),
        (["--peers", "4", "--link", "1mbit/90ms", "--step", "1s", "--data", "nowhere"], "there is no text at "),
        (
            ["--link", "38mbit/90ms", "--step", "1s"],
            "one peer exchanges nothing; say how many there will be: --peers 4",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_cure(plan, words: list[str], part: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1

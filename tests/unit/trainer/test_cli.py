# SPDX-License-Identifier: Apache-2.0
"""The command line: exit codes, one sentence on stderr for every mistake, results on stdout."""

import asyncio
import dataclasses
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import torch

from isthmus.collective.transport.interfaces import is_home
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, STATE_NAME, CheckpointMeta, CheckpointStore
from isthmus.trainer.cli.app import run
from isthmus.trainer.cli.support import take_apart
from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import DecoderSection
from isthmus.trainer.contact.ticket import decode_ticket, encode_ticket, make_ticket
from isthmus.trainer.errors import ConfigError, ExitCode, IsthmusError, Refused, operator_error
from isthmus.trainer.run.control_socket import ControlClient
from isthmus.trainer.run.options import Founding

REPOSITORY = Path(__file__).parents[3]
ON_THIS_MACHINE = make_ticket(
    ticket_id=b"ticket 1",
    secret=b"s" * 32,
    run_id="demo-0123abcd",
    addresses=["127.0.0.1:1"],
    expires_at_s=1_900_000_000,
    fingerprint=b"f" * 32,
)
TICKET = encode_ticket(ON_THIS_MACHINE)
FAR_TICKET = encode_ticket(dataclasses.replace(ON_THIS_MACHINE, addresses=("203.0.113.7:7000",)))
IN_ETCD = ("--coordinator.store", "etcd", "--coordinator.etcd", '["127.0.0.1:1"]')
STANDBY_TICKET = encode_ticket(dataclasses.replace(ON_THIS_MACHINE, secret=b"s" * 32))
MODEL = DecoderSection(preset="nano", num_layers=1, seq_len=16)
LAUNCH = "from isthmus.trainer.cli.app import main; main()"

TELLS_WHEN_TORCH_IS_LOADED = f"""
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is loaded, and its threads spin for", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
{LAUNCH}
"""


DESLOC_WITH_SGD = ("--outer.type", "desloc", "--inner.type", "sgd")


def in_a_process(
    *arguments: str, cwd: Path, launch: str = LAUNCH, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", launch, *arguments],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
        | (environment or {}),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


class Isthmus(Protocol):
    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def isthmus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Isthmus]:
    """Runs a command line in `tmp_path`, in this process: another one takes seconds to begin.

    Nothing can be split off from a process that has threads.
    """
    monkeypatch.setattr("isthmus.trainer.cli.peers.load_for_training", lambda loop: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["isthmus"])
    for name in [name for name in os.environ if name.startswith("ISTHMUS")]:
        monkeypatch.delenv(name)

    def run_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            code = run(list(arguments))
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    root, ours = logging.getLogger(), logging.getLogger("isthmus")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield run_line
    root.handlers[:] = handlers
    for logger, level in zip((root, ours), levels, strict=True):
        logger.setLevel(level)


def assert_one_sentence(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("isthmus: ")
    for part in parts:
        assert part in done.stderr


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["jion"], ["no such command 'jion'", "join"]),
        (["up", "--lisen", "x"], ["no such option: --lisen", "did you mean --listen"]),
        (["up", "--lr", "1"], ["no such option: --lr; did you mean --inner.lr or --outer.lr?"]),
        (["up", "--seq_len", "1"], ["no such option: --seq-len; did you mean --model.seq_len?"]),
        (["up", "--frobnicate"], ["no such option: --frobnicate; isthmus up -h lists what there is"]),
        (["status", "--lr", "1"], ["no such option: --lr; isthmus status -h lists what there is"]),
        (["up", "--peers"], ["option '--peers' requires an argument"]),
        (["up", "--peers", "many"], ["--peers"]),
        (["up", "surplus"], ["surplus"]),
        (["up", "--peers", "0"], ["members.start_peers from --peers is 0, expected at least 1"]),
        (["up", "--inner.lr"], ["--inner.lr needs a value"]),
        (["up", "--inner.lr", "--verbose"], ["--inner.lr needs a value"]),
        (["up", "--inner.lr", "fast"], ['inner.lr from --inner.lr is "fast", expected a number']),
        (["up", "--dir", os.fsdecode(b"/tmp/\xff")], ["the value of --dir is not UTF-8 text"]),
        (["up", "--inner.lrr=1"], ["unknown key inner.lrr from --inner.lrr; did you mean inner.lr?"]),
        (["up", "-c", "none.toml"], ["there is no file none.toml"]),
        (["up", "--resume", "nowhere"], ["nowhere holds no checkpoint"]),
        (["up", "--listen", "nonsense"], ['node.listen from --listen is "nonsense", expected host:port']),
        (["up", "--listen", "10.0.0.1:7000", "--tls", "off"], ["node.listen 10.0.0.1:7000", "--tls", "--insecure"]),
        (["up", "--advertise", "example.org:7000", "--net.tls=off"], ["node.advertise example.org:7000", "--insecure"]),
        (["join", TICKET, "--tls", "off", "--node.listen=192.168.1.2:0"], ["node.listen 192.168.1.2:0", "--insecure"]),
        (["join", FAR_TICKET, "--tls", "off"], ["the ticket's address 203.0.113.7:7000", "--insecure"]),
        (["coordinator", "--listen", "[::]:0", "--tls", "off"], ["node.listen [::]:0", "--insecure"]),
        (["up", "--insecure", "--tls", "on"], ["--insecure contradicts net.tls on from --tls"]),
        (["up", "--insecure", "--net.tls", "auto"], ["--insecure contradicts net.tls auto from --net.tls"]),
        (["up", "--tls", "of"], ["net.tls from --tls is \"of\", expected 'auto', 'on' or 'off'; did you mean off?"]),
        (["up", "--tls", "off"], ["node.listen *:0 is beyond this machine", "--insecure"]),
        (["up", "--advertise", "*:7"], ["node.advertise", "an address that others can dial"]),
        (
            ["up", "--max-upload", "20Mb"],
            ['node.max_upload from --max-upload is "20Mb", expected a rate such as "20mbit"'],
        ),
        (["join", TICKET, "--max-download", "0"], ["node.max_download from --max-download is 0, expected at least"]),
        (["coordinator", "--standby", STANDBY_TICKET], ["coordinator.store sqlite is a file of one coordinator"]),
        (["coordinator", "--standby", "@nowhere"], ["the ticket's file nowhere cannot be read"]),
        (
            ["coordinator", "--standby", STANDBY_TICKET, *IN_ETCD, "--listen", "127.0.0.1:2"],
            ["peers look for coordinators at 127.0.0.1:1, and not at 127.0.0.1:2", "--listen"],
        ),
        (
            ["coordinator", "--standby", STANDBY_TICKET, *IN_ETCD, "--listen", "127.0.0.1:1", "--resume", "x"],
            ["x holds no checkpoint"],
        ),
        (["coordinator", "--max-upload", "1MB"], ["no such option: --max-upload"]),
        *(
            ([command, *DESLOC_WITH_SGD], ["outer exchanges 'exp_avg', which inner.type = 'sgd' does not keep; take"])
            for command in ("up", "coordinator")
        ),
        (
            ["up", "--outer.type", "demo"],
            ["[outer] demo does not fit", "must be plain SGD (sgd), not inner.type adamw"],
        ),
        (["up", "--streams", "65"], ["net.num_streams from --streams is 65, expected at most 64"]),
        (["join", TICKET, "--device", "abacus"], ["node.device from --device"]),
        (["join"], ["there is no ticket, and under runs/ no peer that could come back without one", "--dir"]),
        (["join", "--dir", "nowhere"], ["nowhere has joined no run yet; join with a ticket"]),
        (["evict", "somebody"], ["somebody is no peer; give the 16 hexadecimal digits of its id"]),
        (["ticket", "--once", "--revoke", "0" * 16], ["--revoke is about one ticket that exists"]),
        (["ticket", "--lifetime", "soon"], ["--lifetime is soon, expected"]),
        (["join", "@nowhere"], ["the ticket's file nowhere cannot be read: No such file or directory"]),
        (["status", "--inner.lr", "1"], ["no such option --inner.lr", "isthmus status takes no configuration"]),
        (["sample", "x", "--model", "nowhere"], ["nowhere"]),
        (["sample", "x", "--top-k", "0"], ["--top-k"]),
        (["sample", "x", "--seed", str(2**63)], ["--seed"]),
        (["export"], ["there is no run under runs/ here"]),
        (["export", "--dir", "nowhere"], ["nowhere holds no checkpoint"]),
        (["audit"], ["missing argument 'RUNDIR...'"]),
        (["audit", "nowhere"], ["nowhere does not exist"]),
        (["audit", "."], ["there is no journal in .; name the folder of its founder or coordinator too"]),
        (["config", "show", "--run.seed", "-1"], ["run.seed from --run.seed is -1, expected at least 0"]),
        (["config"], ["missing command"]),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(isthmus: Isthmus, arguments: list[str], parts: list[str]) -> None:
    assert_one_sentence(isthmus(*arguments), ExitCode.USAGE, *parts)


def test_a_process_ends_with_the_sentence_and_the_code(tmp_path: Path) -> None:
    assert_one_sentence(in_a_process("jion", cwd=tmp_path), ExitCode.USAGE, "no such command 'jion'", "join")


@pytest.mark.parametrize(("hard", "expected"), [(600, 600), (None, 1 << 16)], ids=["as far as may be", "and no more"])
def test_a_process_may_open_more_files_than_its_shell_says(tmp_path: Path, hard: int | None, expected: int) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard is None and most != resource.RLIM_INFINITY:
        expected = min(expected, most)
    code = f"""
import resource
from isthmus.trainer.cli.app import main
resource.setrlimit(resource.RLIMIT_NOFILE, (128, {most if hard is None else hard}))
try:
    main()
finally:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = in_a_process("--version", cwd=tmp_path, launch=code)
    assert (done.stdout.splitlines()[-1], done.stderr) == (str(expected), "")


def test_every_mistake_in_a_configuration_has_a_line_of_its_own(isthmus: Isthmus) -> None:
    done = isthmus("up", "--inner.lrr", "1", "--run.seed=-1", "--peers", "0")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.splitlines() == [
        "isthmus: unknown key inner.lrr from --inner.lrr; did you mean inner.lr?",
        "isthmus: members.start_peers from --peers is 0, expected at least 1",
        "isthmus: run.seed from --run.seed is -1, expected at least 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "errors"),
    [
        (
            ["config", "show", "--inner.lrr", "1", "--run.seed=-1"],
            2,
            [
                {
                    "sentence": "unknown key inner.lrr from --inner.lrr; did you mean inner.lr?",
                    "cure": "did you mean inner.lr?",
                    "key": "inner.lrr",
                    "origin": "--inner.lrr",
                },
                {
                    "sentence": "run.seed from --run.seed is -1, expected at least 0",
                    "cure": None,
                    "key": "run.seed",
                    "origin": "--run.seed",
                },
            ],
        ),
        (
            ["status", "--dir", "x"],
            4,
            [{"sentence": "no isthmus runs in x; name the folder of a running peer with --dir"}],
        ),
        (["peers", "--foo"], 2, [{"sentence": "no such option: --foo; isthmus peers -h lists what there is"}]),
    ],
)
def test_with_json_an_error_is_one_object_on_stderr(
    isthmus: Isthmus, arguments: list[str], code: int, errors: list[dict[str, object]]
) -> None:
    done = isthmus(*arguments, "--json")
    assert (done.returncode, done.stdout) == (code, "")
    told = json.loads(done.stderr)
    assert (told["schema"], told["exit_code"]) == ("isthmus.error/1", code)
    assert [found | wanted for found, wanted in zip(told["errors"], errors, strict=True)] == told["errors"]


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="needs a machine with fewer devices than workers")
@pytest.mark.parametrize("command", [("up", "--data", str(Path(__file__))), ("join", TICKET)])
def test_missing_devices_are_told_before_a_ticket_is_printed_or_anything_is_written(
    isthmus: Isthmus, tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = isthmus(*command, "--device", "cuda", "--local-workers", "4")
    assert_one_sentence(done, ExitCode.ENVIRONMENT, "4 workers need as many CUDA devices", "node.device to cpu")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("ticket", "part"),
    [
        ("hello", "this is not a ticket"),
        (TICKET[:-9], "the ticket's end is missing"),
        (TICKET[:30] + ("b" if TICKET[30] == "a" else "a") + TICKET[31:], "the ticket is damaged"),
        ("isthmus1" + TICKET[8:], "this ticket is of version 1"),
    ],
)
def test_bad_ticket_is_one_sentence_and_exit_code_5(isthmus: Isthmus, ticket: str, part: str) -> None:
    assert_one_sentence(isthmus("join", ticket), ExitCode.REFUSED, part)


def test_tickets_of_peers_and_of_standbys_are_not_mistaken_for_each_other(isthmus: Isthmus) -> None:
    as_peer = isthmus("join", STANDBY_TICKET)
    assert_one_sentence(as_peer, ExitCode.REFUSED, "for standby coordinators", "that the coordinator printed")
    as_standby = isthmus("coordinator", "--standby", TICKET)
    assert_one_sentence(as_standby, ExitCode.REFUSED, "this ticket lets peers in", "standby.ticket")


@pytest.mark.parametrize("command", ["status", "leave"])
def test_where_nothing_runs_the_exit_code_is_4(isthmus: Isthmus, command: str) -> None:
    assert_one_sentence(isthmus(command), ExitCode.NOBODY_REACHABLE, "name its folder with --dir")
    assert_one_sentence(isthmus(command, "--dir", "x"), ExitCode.NOBODY_REACHABLE, "no isthmus runs in x")


def test_variable_with_an_unknown_key_is_a_mistake(isthmus: Isthmus) -> None:
    done = isthmus("config", "show", ISTHMUS__INNER__LRR="1")
    assert_one_sentence(done, ExitCode.USAGE, "unknown key inner.lrr from ISTHMUS__INNER__LRR")


# ------------------------------------------------------------------------------------------------------------ our bugs

BROKEN = """
import isthmus.trainer.cli.app, isthmus.trainer.cli.peers
def status(*_, **__): raise KeyError("secret detail")
isthmus.trainer.cli.peers.client_of = status
isthmus.trainer.cli.app.main()
"""


def test_bug_is_one_sentence_that_names_a_file_with_the_story(tmp_path: Path) -> None:
    done = in_a_process("status", cwd=tmp_path, launch=BROKEN, environment={"TMPDIR": str(tmp_path)})
    assert_one_sentence(done, ExitCode.UNEXPECTED, "this is a bug in isthmus (KeyError: 'secret detail')")
    story = Path(re.search(r"report it with (\S+)", done.stderr)[1])
    assert story.parent == tmp_path
    assert "Traceback" in story.read_text()


def test_debug_shows_the_traceback_of_any_error(
    isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr("isthmus.trainer.cli.peers.client_of", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for arguments in (["status", "--debug"], ["--debug", "join", "hello"]):
        done = isthmus(*arguments)
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("isthmus: ")


def test_error_inside_task_groups_is_the_operators_only_if_all_of_it_is() -> None:
    refused, bug = Refused("no"), KeyError("x")
    assert operator_error(ExceptionGroup("a", [ExceptionGroup("b", [refused])])) is refused
    assert operator_error(ExceptionGroup("a", [refused, bug])) is None
    assert operator_error(bug) is None


# ------------------------------------------------------------------------------------------------------------- results


def test_help_and_version_answer_without_torch_or_zmq_and_config_show_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[inner]\nlr = 0.25\n")
    code = """
import sys
from isthmus.trainer.cli.app import run
for arguments in ([], ["--help"], ["-h"], ["up", "--help"], ["join", "-h"], ["--version"]):
    assert run(arguments) == 0
    assert not {"torch", "zmq"} & set(sys.modules)
    print("----")
assert run(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""
    done = in_a_process(
        "config", "show", "--origin", "-c", "a.toml", "--run.seed=3", "--outer.codec", "raw",
        cwd=tmp_path,
        launch=code,
        environment={"ISTHMUS__EVAL__BATCHES": "2"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    *told, shown = done.stdout.split("----\n")
    assert len(told) == 6
    assert all("isthmus" in text for text in told)
    assert "lr = 0.25  # (a.toml) Peak learning rate" in shown
    assert "seed = 3  # (--run.seed)" in shown
    assert 'codec = "raw"  # (--outer.codec)' in shown
    assert "batches = 2  # (ISTHMUS__EVAL__BATCHES)" in shown


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"_ISTHMUS_COMPLETE": "complete_bash", "COMP_WORDS": "isthmus jo", "COMP_CWORD": "1"}
    assert in_a_process(cwd=tmp_path, environment=asked).stdout.split() == ["join"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("isthmus up --outer.ke", ["--outer.keep"]),
        ("isthmus up --outer.type streaming --outer.num-f", ["--outer.num_fragments"]),
        ("isthmus config show --run.s", ["--run.seed"]),
        ("isthmus coordinator --outer.type str", ["streaming"]),
        ("isthmus up --inner.type a", ["adamw", "adopt"]),
        ("isthmus up --advert", ["--advertise"]),
        ("isthmus status --outer.ke", []),
    ],
)
def test_a_shell_completes_keys_of_the_configuration_and_types(
    isthmus: Isthmus, capfd: pytest.CaptureFixture[str], line: str, words: list[str]
) -> None:
    def completed(**asked: str) -> str:
        with pytest.raises(SystemExit):
            isthmus(**asked)
        return capfd.readouterr().out

    in_bash = completed(_ISTHMUS_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    assert sorted(in_bash.split()) == words
    in_zsh = completed(_ISTHMUS_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert sorted(word for word in re.findall(r'"([^"]+)"', in_zsh) if word.startswith(("-", *words))) == words


@pytest.mark.parametrize("words", ["config show", "config reference"], ids=["short", "longer than a buffer"])
def test_a_reader_that_has_enough_is_no_mistake_and_a_full_disk_is_told(tmp_path: Path, words: str) -> None:
    command = f"{sys.executable} -c '{LAUNCH}' {words}"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY / "src")}

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        run = ["bash", "-c", line]
        return subprocess.run(
            run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=55, check=False
        )

    done = shell(f"set -o pipefail; {command} | true")
    assert (done.returncode, done.stderr) == (0, "")
    assert_one_sentence(shell(f"{command} > /dev/full"), ExitCode.ENVIRONMENT, "No space left on device")
    assert (shell(f"{command} >&-").returncode, shell(f"{command} >&- 2>&- <&-").returncode) == (0, 0)


def test_config_show_as_json_is_one_object(isthmus: Isthmus) -> None:
    done = isthmus("config", "show", "--json")
    assert json.loads(done.stdout)["schema"] == "isthmus.config/1"


def saved_run(run_dir: Path, run_id: str = "demo-0123abcd", outer_step: int = 4) -> CheckpointStore:
    config = Config(model=MODEL)
    anchor = config.model.description().initial_parameters(seed=1)
    store = CheckpointStore(run_dir / FOLDER_NAME, keep=3)
    meta = CheckpointMeta(
        run_id=run_id, outer_step=outer_step, digest=bytes(32), run_manifest=manifest_of(config), next_index=0
    )
    store.save(meta, {"anchor": anchor, "momentum": torch.zeros_like(anchor)})
    return store


def test_export_then_sample_gives_text_on_stdout(isthmus: Isthmus, tmp_path: Path) -> None:
    saved_run(tmp_path / "runs" / "demo")
    exported = isthmus("export", "--json")
    assert json.loads(exported.stdout) == {
        "schema": "isthmus.export/1",
        "run_id": "demo-0123abcd",
        "outer_step": 4,
        "num_parameters": MODEL.description().num_parameters(),
        "directory": "model",
    }
    sampled = isthmus("sample", "The sea", "--tokens", "5", "--temperature", "0")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.startswith("The sea")
    assert sampled.stderr == ""
    no_text = isthmus("sample", os.fsdecode(b"\xff sea"), "--tokens", "1")
    assert (no_text.returncode, no_text.stdout[:5]) == (0, "\ufffd sea"), no_text.stderr


def test_a_sample_of_nothing_begins_as_a_line_does(isthmus: Isthmus, tmp_path: Path) -> None:
    saved_run(tmp_path / "runs" / "demo")
    assert isthmus("export").returncode == 0
    nothing, line = (isthmus("sample", prompt, "--tokens", "5", "--temperature", "0") for prompt in ("", "\n"))
    assert (nothing.returncode, line.returncode) == (0, 0), nothing.stderr
    assert line.stdout == "\n" + nothing.stdout
    assert len(nothing.stdout.encode()) > 5, "the tokens, and a line's end"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_utf_8_gets_the_result_in_escapes(tmp_path: Path, encoding: str) -> None:
    launch = (
        "from isthmus.trainer.cli import app, config; "
        "app.config_app.command('say')(lambda: print('\u2713 \ufffd')); app.main()"
    )
    said = in_a_process("config", "say", cwd=tmp_path, launch=launch, environment={"PYTHONIOENCODING": encoding})
    assert (said.returncode, said.stdout, said.stderr) == (0, "\\u2713 \\ufffd\n", "")


def test_changed_byte_in_the_only_checkpoint_is_exit_code_9(isthmus: Isthmus, tmp_path: Path) -> None:
    store = saved_run(tmp_path / "run")
    path = store.path_of(4) / STATE_NAME
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    done = isthmus("export", "--dir", "run")
    assert done.returncode == ExitCode.INTEGRITY
    assert "was changed since it was written" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_init_writes_a_file_that_founds_a_run_and_never_over_another(isthmus: Isthmus) -> None:
    done = isthmus("init")
    assert (done.returncode, done.stderr) == (ExitCode.DONE, "")
    assert "isthmus up -c run.toml" in done.stdout
    shown = [isthmus("config", "show", *more).stdout for more in ((), ("-c", "run.toml"))]
    assert shown[0] == shown[1]
    assert_one_sentence(isthmus("init"), ExitCode.USAGE, "run.toml exists already")
    assert_one_sentence(isthmus("init", "no/where.toml"), ExitCode.USAGE, "no is no folder")


def test_init_leaves_no_half_of_a_file_where_there_is_no_room(isthmus: Isthmus, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        done = isthmus("init")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_one_sentence(done, ExitCode.ENVIRONMENT, "run.toml cannot be written: File too large")
    assert not (tmp_path / "run.toml").exists()


def test_of_several_peers_of_one_run_the_furthest_is_exported(isthmus: Isthmus, tmp_path: Path) -> None:
    for name, outer_step in (("a", 4), ("b", 12), ("c", 8)):
        saved_run(tmp_path / "runs" / name, outer_step=outer_step)
    assert json.loads(isthmus("export", "--json").stdout)["outer_step"] == 12


def test_several_runs_have_to_be_told_apart(isthmus: Isthmus, tmp_path: Path) -> None:
    saved_run(tmp_path / "runs" / "a")
    saved_run(tmp_path / "runs" / "b", run_id="another-0123abcd")
    assert_one_sentence(isthmus("export"), ExitCode.USAGE, "runs/a, runs/b; choose one with --dir")


# -------------------------------------------------------------------------------------------------------------- peers


class Daemon:
    """Stands in for the daemon: says what it was given, and founds or is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: list[Any] = []
        monkeypatch.setattr("isthmus.trainer.run.daemon.run_daemon", self._run)
        monkeypatch.setattr("isthmus.trainer.cli.peers.load_for_training", lambda _loop: None)

    async def _run(self, options: Any) -> int:
        self.options.append(options)
        if isinstance(options.role, Founding):
            options.role.announce_ticket(decode_ticket(TICKET), None)
            return int(ExitCode.LEFT)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._refuse())
        return 0

    async def _refuse(self) -> None:
        raise Refused("the run does not want us")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(monkeypatch)


def test_up_hands_the_daemon_its_options_and_prints_the_ticket(
    isthmus: Isthmus, daemon: Daemon, tmp_path: Path
) -> None:
    done = isthmus("up", "--name", "demo", "--peers", "3", "--ticket-file", "t", "--run.seed=5")
    assert (done.returncode, done.stderr) == (ExitCode.LEFT, "")
    assert f"\n    isthmus join {TICKET}\n" in done.stdout
    (options,) = daemon.options
    config = options.resolved.config
    assert (config.run.name, config.members.start_peers, config.run.seed) == ("demo", 3, 5)
    assert options.run_dir == tmp_path / "runs" / "demo"
    assert (tmp_path / "t").read_text() == f"{TICKET}\n"
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600


def test_coordinator_prints_the_ticket_too(isthmus: Isthmus, daemon: Daemon) -> None:
    done = isthmus("coordinator")
    assert done.returncode == ExitCode.LEFT, done.stderr
    assert done.stdout.startswith("others join with (until ")
    assert done.stdout.splitlines()[-2:] == [f"    isthmus join {TICKET}", ""]


def test_resumed_run_keeps_its_manifest_unless_told_otherwise(isthmus: Isthmus, daemon: Daemon, tmp_path: Path) -> None:
    saved_run(tmp_path / "old")
    done = isthmus("up", "--resume", "old", "--peers", "2", "--dir", "new")
    assert (done.returncode, done.stderr) == (ExitCode.LEFT, "")
    (options,) = daemon.options
    config = options.resolved.config
    assert (config.run.name, config.members.start_peers, options.run_dir) == ("run", 2, tmp_path / "new")
    assert config.model == MODEL


def test_join_hands_over_the_ticket_and_ends_with_the_code_of_a_refusal(
    isthmus: Isthmus, daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "t").write_text(TICKET + "\n")
    done = isthmus("join", "@t", "--local-workers", "2")
    assert (done.returncode, done.stderr) == (ExitCode.REFUSED, "isthmus: the run does not want us\n")
    (options,) = daemon.options
    assert options.role.ticket.run_id == "demo-0123abcd"
    assert options.resolved.config.node.local_workers == 2
    assert options.run_dir == tmp_path / "runs" / "demo-0123abcd"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up"], "auto None *:0 None None"),
        (["up", "--listen", "10.0.0.1:7"], "auto None 10.0.0.1:7 None None"),
        (["up", "--tls", "off", "--listen", "127.0.0.1:0"], "off None 127.0.0.1:0 None None"),
        (["up", "--streams", "4", "--max-upload", "20mbit"], "auto 4 *:0 2500000.0 None"),
        (["coordinator", "--listen", "[2001:db8::1]:0", "--tls", "on"], "on None [2001:db8::1]:0 None None"),
        (["join", FAR_TICKET, "--max-upload", "6MB", "--max-download", "1gbit/s"],
         "auto None *:0 6000000.0 125000000.0"),
    ],
)  # fmt: skip
def test_the_line_is_as_the_flags_say_and_encryption_needs_no_insistence(
    isthmus: Isthmus, daemon: Daemon, arguments: list[str], line: str
) -> None:
    isthmus(*arguments)
    assert line_of(daemon) == line


def line_of(daemon: Daemon) -> str:
    (options,) = daemon.options
    net, node = options.resolved.config.net, options.resolved.config.node
    return f"{net.tls} {net.num_streams} {node.listen} {node.max_upload_bytes_per_s} {node.max_download_bytes_per_s}"


@pytest.mark.parametrize("tls", [[], ["--tls", "off"]])
@pytest.mark.parametrize("command", [["up"], ["coordinator"], ["join", FAR_TICKET]])
def test_without_encryption_every_start_beyond_this_machine_warns(
    isthmus: Isthmus, daemon: Daemon, command: list[str], tls: list[str]
) -> None:
    done = isthmus(*command, "--listen", "10.0.0.1:7", "--insecure", *tls)
    assert line_of(daemon) == "off None 10.0.0.1:7 None None"
    warned = done.stderr.splitlines()[0]
    assert "WARNING" in warned
    assert "not_encrypted listen=10.0.0.1:7; " in warned
    assert "leave out --insecure" in warned


SERVING_DAEMON = """
import asyncio, os, sys
from pathlib import Path
from isthmus.trainer.run.control_socket import ControlServer
from isthmus.trainer.record.status import Status
class Daemon:
    def __init__(self): self.ended = asyncio.Event()
    def status(self):
        return Status(run_id="demo-0123abcd", peer_id="0123456789abcdef", incarnation=1, pid=os.getpid(),
                      phase="training", outer_step=1, total_outer_steps=2)
    def leave(self): self.ended.set()
    stop = leave
async def main():
    daemon = Daemon()
    with ControlServer(Path(sys.argv[1]), daemon, peer_id="0123456789abcdef", run_id="demo-0123abcd") as server:
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.serve())
            await daemon.ended.wait()
            task.cancel()
asyncio.run(main())
"""


def test_old_ticket_is_only_warned_of_before_the_coordinator_decides(isthmus: Isthmus, daemon: Daemon) -> None:
    old = make_ticket(
        ticket_id=b"ticket 1", secret=b"s" * 32, run_id="demo-0123abcd", addresses=["127.0.0.1:1"], expires_at_s=1
    )
    done = isthmus("join", encode_ticket(old))
    assert done.returncode == ExitCode.REFUSED
    assert len(daemon.options) == 1
    warned, refused = done.stderr.splitlines()
    assert "ticket_old" in warned
    assert refused == "isthmus: the run does not want us"


def test_status_and_leave_of_a_running_peer(isthmus: Isthmus, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    run_dir.mkdir(parents=True)
    daemon = subprocess.Popen(
        [sys.executable, "-c", SERVING_DAEMON, str(run_dir)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        as_json = isthmus("status", "--json")
        assert msgspec.json.decode(as_json.stdout)["schema"] == "isthmus.status/1"
        assert "outer step 1 of 2" in isthmus("status").stdout
        left = isthmus("leave", "--dir", str(run_dir))
        assert (left.returncode, left.stdout, left.stderr) == (0, "", "")
        assert daemon.wait(20) == 0
    finally:
        daemon.kill()
        daemon.communicate(timeout=20)


def test_daemon_that_is_stopped_is_told_within_the_deadline(
    isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(ControlClient.__init__.__kwdefaults__, "timeout_s", 0.5)
    daemon = subprocess.Popen(
        [sys.executable, "-c", SERVING_DAEMON, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    try:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        daemon.send_signal(signal.SIGSTOP)
        done = isthmus("status", "--dir", str(tmp_path))
        assert_one_sentence(done, ExitCode.NOBODY_REACHABLE, "did not answer in 0.5 s")
    finally:
        daemon.kill()
        daemon.communicate(timeout=20)


# -------------------------------------------------------------------------------------------------------------- pieces


def test_config_flags_are_taken_out_of_the_command_line() -> None:
    taken = take_apart(
        ["up", "--inner.lr", "-1", "--data", "./x.y", "--run.name=a=b", "--debug", "--", "--inner.lr", "2"]
    )
    assert taken.arguments == ("up", "--data", "./x.y", "--", "--inner.lr", "2")
    assert taken.overrides == (("inner.lr", "-1"), ("run.name", "a=b"))
    assert taken.debug
    with pytest.raises(ConfigError):
        take_apart(["up", "--inner.lr"])
    alike = take_apart(["up", "--run.outer-steps", "3", "--ticket_file=a_b", "--dry_run", "a_b"])
    assert alike.overrides == (("run.outer_steps", "3"),)
    assert alike.arguments == ("up", "--ticket-file=a_b", "--dry-run", "a_b")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:5", True),
        ("[::1]:5", True),
        ("localhost:5", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("example.org:5", False),
        ("10.0.0.1:5", False),
    ],
)
def test_loopback_is_known_by_its_address(address: str, expected: bool) -> None:
    assert is_home(address) is expected


def test_every_operator_error_has_an_exit_code_of_its_own() -> None:
    def tree(kind: type[IsthmusError]) -> list[type[IsthmusError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in tree(child))]

    kinds = [kind for kind in tree(IsthmusError)[1:] if not kind.__name__.startswith("_")]
    codes = {kind.exit_code for kind in kinds}
    assert ExitCode.UNEXPECTED not in codes
    assert {2, 3, 4, 5, 8, 9, 10} <= {int(code) for code in codes}


def test_ticket_of_these_tests_is_a_ticket() -> None:
    assert decode_ticket(TICKET).run_id == "demo-0123abcd"


@pytest.mark.parametrize(
    "words",
    [
        ("up",),
        ("join", TICKET),
        ("plan", "--peers", "2"),
        ("sample", "a", "--model", "."),
        ("eval", "."),
    ],
    ids=lambda words: words[0],
)
def test_threads_of_torch_hear_that_they_are_to_spin_briefly_before_it_is_loaded(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Found: a config loaded it first, and two peers on two cores were ten times slower."""
    done = in_a_process(*words, cwd=tmp_path, launch=TELLS_WHEN_TORCH_IS_LOADED)
    assert done.stdout == "torch is loaded, and its threads spin for 1000\n"

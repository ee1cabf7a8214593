# SPDX-License-Identifier: Apache-2.0
"""compose.yml, the Dockerfile and the entrypoint, checked as far as they can be without a Docker engine.

With one: tests/docker.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from isthmus.trainer.config.peers import NodeSection
from isthmus.trainer.errors import RESTARTABLE, ExitCode
from scripts.wanlink.namespaces import TUN_PATH
from scripts.wanlink.uplink import SYSCTLS

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
UNPRIVILEGED_ID = "10001"
CAPABILITIES_OF_A_SHAPED_PEER = {"NET_ADMIN", "SYS_NICE", "SETUID", "SETGID"}


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, as Compose does and PyYAML does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {key for key in written if written.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"keys stand twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((ROOT / "compose.yml").read_text())


@pytest.fixture(scope="module")
def schema() -> Any:
    return json.loads(Path(__file__).with_name("compose_schema.json").read_text())


# --------------------------------------------------------------------------------------- compose


def test_compose_file_follows_the_compose_specification(compose: Any, schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(compose)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privileged", True),
        ("pid", "host"),
        ("restart", "sometimes"),
        ("image", "isthmus"),
        ("command", "isthmus join"),
        ("user", "root"),
        ("stop_grace_period", "90"),
        ("volumes", ["ticket"]),
        ("ports", ["9464:9464"]),
        ("sysctls", {"kernel.msgmax": "1"}),
        ("cap_add", ["CAP_net_admin"]),
    ],
)
def test_schema_refuses_what_the_specification_or_we_do_not_allow(
    compose: Any, schema: Any, key: str, value: object
) -> None:
    broken = json.loads(json.dumps(compose))
    broken["services"]["peer"][key] = value
    assert not jsonschema.Draft202012Validator(schema).is_valid(broken)


def test_one_coordinator_and_three_peers_run_one_image_that_is_built_once(compose: Any) -> None:
    coordinator, peer = compose["services"]["coordinator"], compose["services"]["peer"]
    assert len(compose["services"]) == 2
    assert peer["deploy"] == {"replicas": 3}
    assert coordinator["image"] == peer["image"]
    assert "build" not in peer  # or Compose builds the image once for each service
    assert ROOT / coordinator["build"]["context"] == ROOT
    assert (ROOT / coordinator["build"]["dockerfile"]).is_file()


def test_every_build_argument_has_a_default_in_the_dockerfile(compose: Any) -> None:
    arguments = {rest.split("=")[0] for name, rest in instructions() if name == "ARG"}
    assert set(compose["services"]["coordinator"]["build"]["args"]) <= arguments


def test_every_peer_waits_for_the_coordinators_ticket_and_joins_with_nothing_else(compose: Any) -> None:
    coordinator, peer = compose["services"]["coordinator"], compose["services"]["peer"]
    ticket = coordinator["command"][coordinator["command"].index("--ticket-file") + 1]
    assert ticket in coordinator["healthcheck"]["test"][1]
    volume = next(v for v in coordinator["volumes"] if isinstance(v, str) and v.startswith("ticket:"))
    assert ticket.startswith(volume.split(":")[1] + "/")
    assert peer["command"] == ["isthmus", "join", f"@{ticket}"]
    assert peer["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
    assert f"{volume}:ro" in peer["volumes"]


def test_every_named_volume_is_declared_and_used_and_peers_share_no_run_directory(compose: Any) -> None:
    mounts = {
        name: [v.split(":") for v in service["volumes"] if isinstance(v, str)]
        for name, service in compose["services"].items()
    }
    assert {volume for found in mounts.values() for volume, *_ in found} == set(compose["volumes"])
    assert "/var/lib/isthmus" in [target for _, target, *_ in mounts["coordinator"]]
    assert "/var/lib/isthmus" not in [target for _, target, *_ in mounts["peer"]]  # the image gives each one of its own


def test_bind_mounts_are_read_only_and_never_invented_by_the_engine(compose: Any) -> None:
    binds = [v for s in compose["services"].values() for v in s["volumes"] if isinstance(v, dict)]
    assert binds
    for bind in binds:
        assert bind["read_only"] is True
        assert bind["bind"]["create_host_path"] is False
        assert (ROOT / re.sub(r"\$\{[A-Z_]+:-(.*)\}", r"\1", bind["source"])).is_file()


def test_capabilities_are_minimal_and_only_where_a_link_is_shaped(compose: Any) -> None:
    for service in compose["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        is_shaped = bool(service["environment"].get("SHAPE_LINK"))
        expected = CAPABILITIES_OF_A_SHAPED_PEER if is_shaped else set()
        assert set(service.get("cap_add", [])) == expected
        assert service["user"] == ("0:0" if is_shaped else f"{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}")


def test_scenario_has_a_link_for_each_peer_and_lies_where_the_entrypoint_looks(compose: Any) -> None:
    peer = compose["services"]["peer"]
    links = tomllib.loads((DOCKER / "scenario.toml").read_text())["links"]
    assert list(links) == [f"peer-{number}" for number in range(1, peer["deploy"]["replicas"] + 1)]
    copied = next(rest for name, rest in instructions() if name == "COPY" and "docker/scenario.toml" in rest)
    bound = next(v for v in peer["volumes"] if isinstance(v, dict))
    assert bound["target"] == f"{shlex.split(copied)[-1]}scenario.toml"


def test_peers_have_what_the_emulator_asks_for(compose: Any) -> None:
    peer = compose["services"]["peer"]
    assert peer["devices"] == [TUN_PATH]
    assert peer["sysctls"] == SYSCTLS | {"net.ipv4.conf.default.rp_filter": "0"}


def test_peers_share_the_cores_and_tell_their_metrics_to_the_host_alone(compose: Any) -> None:
    peer = compose["services"]["peer"]
    assert peer["environment"]["ISTHMUS__NODE__THREADS"] == "${THREADS:-1}"
    assert peer["ports"] == [f"127.0.0.1::{peer['environment']['ISTHMUS__NODE__METRICS_PORT']}"]
    keys = {name.removeprefix("ISTHMUS__NODE__").lower() for name in peer["environment"] if "__NODE__" in name}
    assert keys <= set(NodeSection.model_fields)


def test_every_restart_goes_through_the_translation_of_exit_codes(compose: Any) -> None:
    for service in compose["services"].values():
        assert service["restart"] == "on-failure"
        assert service["environment"]["ON_FAILURE"] == "1"


def test_compose_passes_only_variables_that_the_entrypoint_reads(compose: Any) -> None:
    read = set(re.findall(r"\$\{?([A-Z_]+)", (DOCKER / "entrypoint.sh").read_text()))
    passed = {name for service in compose["services"].values() for name in service["environment"]}
    of_the_configuration = {name for name in passed if name.startswith("ISTHMUS__NODE__")}
    assert passed - of_the_configuration <= read


def test_no_key_stands_twice_in_the_compose_file() -> None:
    yaml.load((ROOT / "compose.yml").read_text(), Loader=StrictLoader)
    with pytest.raises(yaml.constructor.ConstructorError):
        yaml.load("a: {b: 1, b: 2}", Loader=StrictLoader)


# ------------------------------------------------------------------------------------ Dockerfile


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (INSTRUCTION, arguments), continuation lines joined, comments left out."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in pairs]


def runtime_stage() -> list[tuple[str, str]]:
    every = instructions()
    stages = [index for index, (name, _) in enumerate(every) if name == "FROM"]
    assert every[stages[-1] :] == [("FROM", "runtime")]  # what is built without a target
    first = next(index for index in stages if every[index][1].endswith(" AS runtime"))
    return every[first : next(index for index in stages if index > first)]


def test_image_runs_as_the_unprivileged_user_that_the_entrypoint_drops_to() -> None:
    users = [rest for name, rest in runtime_stage() if name == "USER"]
    assert users == [f"{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}"]
    assert f"user={UNPRIVILEGED_ID}\n" in (DOCKER / "entrypoint.sh").read_text()


def test_base_images_are_named_with_a_version() -> None:
    arguments = dict(rest.split("=", 1) for name, rest in instructions() if name == "ARG")
    stages = set()
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            assert base in stages | {"scratch"} or re.fullmatch(r"[a-z/]+:[0-9][\w.-]+", base), base
            stages.add(stage)
    assert stages == {"wheels", "own", "runtime", "inventory", "sbom", ""}


def test_all_but_torch_is_installed_by_hash_and_the_lock_names_no_index() -> None:
    installs = [call for name, rest in instructions() if name == "RUN" for call in rest.split("&&") if "pip " in call]
    for call in installs:
        words = set(shlex.split(call))
        by_hash = {"--require-hashes", "--no-deps"} <= words
        assert by_hash or words & {"requirements/torch.txt", "/torch.txt", "--no-index", "--no-build-isolation"}, call
    for path in (ROOT / "requirements").iterdir():
        lines = path.read_text().splitlines()[1:]
        assert not [line for line in lines if "://" in line or line.startswith(("-", "/"))], path
        packages = re.split(r"(?m)^(?=\S)", "\n".join(lines))
        assert path.name == "torch.txt" or all("--hash=sha256:" in item for item in packages if item), path


def test_every_copied_source_exists_and_is_let_through_to_the_builder() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name, rest in instructions():
        if name == "COPY" and "--from=" not in rest:
            *sources, _ = [word for word in shlex.split(rest) if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source.removeprefix("./") in let_through, source


def test_image_holds_every_package_that_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        *(Path(package).parts[0] for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]),
        *(link.readlink().name for link in (ROOT / "src" / "isthmus").iterdir() if link.is_symlink()),
        project["project"]["readme"],
        "hatch_build.py",
        *project["project"]["license-files"],
    }
    copied = {word for name, rest in instructions() if name == "COPY" for word in shlex.split(rest)[:-1]}
    assert needed <= copied


def test_image_asks_status_for_its_health_and_keeps_runs_in_a_volume() -> None:
    stage = runtime_stage()
    health = next(rest for name, rest in stage if name == "HEALTHCHECK")
    assert "isthmus status --json" in health
    assert "SHAPE_LINK=''" in (DOCKER / "isthmus.sh").read_text()  # or every check would shape the link anew
    assert ("VOLUME", "/var/lib/isthmus") in stage
    assert ("WORKDIR", "/var/lib/isthmus") in stage


def test_no_secret_and_no_package_index_is_written_into_the_image() -> None:
    for name, rest in instructions():
        if name in ("ARG", "ENV"):
            assert not re.search(r"token|password|secret|://", rest, re.IGNORECASE), rest
    assert ("ARG", 'TORCH_INDEX_URL=""') in instructions()
    assert ("ARG", 'PIP_OPTIONS=""') in instructions()


# ------------------------------------------------------------------------------------ entrypoint


@pytest.fixture(scope="module")
def entrypoint() -> Iterator[Path]:
    """A copy where the unprivileged user may read it, wherever this checkout lies."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("dropping root needs setpriv (util-linux)")
    folder = Path(tempfile.mkdtemp(prefix="entrypoint-"))
    folder.chmod(0o755)
    shutil.copy(DOCKER / "entrypoint.sh", folder)
    yield folder / "entrypoint.sh"
    shutil.rmtree(folder)


def environment(**variables: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **variables}


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda code: code.name.lower())
def test_exit_code_reaches_a_restarting_engine_only_if_a_restart_can_cure_it(entrypoint: Path, code: ExitCode) -> None:
    command = [str(entrypoint), "sh", "-c", f"exit {code}"]
    done = subprocess.run(
        command, env=environment(ON_FAILURE="1"), capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == (code if code in RESTARTABLE else 0)
    assert (f"exit code {code:d}," in done.stderr) == (code not in RESTARTABLE and code != 0)


def test_exit_code_is_untouched_without_a_restart_policy(entrypoint: Path) -> None:
    done = subprocess.run([entrypoint, "sh", "-c", "exit 5"], env=environment(), timeout=20, check=False)
    assert done.returncode == 5


def test_sigterm_reaches_the_command_and_its_own_exit_code_comes_back(entrypoint: Path) -> None:
    patient = "trap 'echo asked; exit 7' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [entrypoint, "sh", "-c", patient], env=environment(ON_FAILURE="1"), stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        rest, _ = running.communicate(timeout=20)
    assert rest == "asked\n"
    assert running.returncode == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to drop")
def test_command_of_a_root_container_has_no_privilege_left(entrypoint: Path) -> None:
    look = ["sh", "-c", "id -u; id -G; grep -E 'Cap(Prm|Eff|Inh|Amb)|NoNewPrivs' /proc/self/status"]
    done = subprocess.run(
        [entrypoint, *look], env=environment(), capture_output=True, text=True, timeout=20, check=True
    )
    uid, groups, *status = done.stdout.splitlines()
    assert (uid, groups) == (UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    values = dict(line.split(":\t") for line in status)
    assert values.pop("NoNewPrivs") == "1"
    assert len(values) == 4
    assert set(values.values()) == {"0" * 16}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may shape")
def test_shaping_without_root_is_an_environment_error(entrypoint: Path) -> None:
    done = subprocess.run(
        [entrypoint, "true"],
        env=environment(SHAPE_LINK="peer-1"),
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == ExitCode.ENVIRONMENT
    assert "user 0" in done.stderr

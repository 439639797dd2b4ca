"""Files of launch/container: images and compose files that fit the package. `launch/container/test` builds and runs."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sam3_node.node.monitoring import HealthServer, Page
from sam3_node.settings import load_settings
from tests.support.command_line import command_parser
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions

FOLDER = ROOT / "launch" / "container"
TEXT = (FOLDER / "Containerfile").read_text()


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, those of the stage that it starts from first."""
    lines = re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            current = stages[name] = list(stages.get(parent, []))
        else:
            current.append((word, " ".join(rest.split())))
    return stages


STAGES = read_stages()


def last(stage: str, word: str) -> str | None:
    return next((rest for name, rest in reversed(STAGES[stage]) if name == word), None)


def test_a_build_without_target_is_that_for_a_cpu() -> None:
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_images_run_a_node_that_is_not_root_and_can_be_asked_for_its_health(stage: str) -> None:
    assert last(stage, "USER") == "10001", "Kubernetes compares a number"
    assert command_parser().parse_args(json.loads(str(last(stage, "CMD")))).run
    assert json.loads(str(last(stage, "ENTRYPOINT"))) == ["sam3-node"]
    probe = json.loads(str(last(stage, "HEALTHCHECK")).partition("CMD ")[2])
    assert "'127.0.0.1', 9464" in probe[2]
    assert any("SAM3_HEALTH__BIND=127.0.0.1:9464" in rest for word, rest in STAGES[stage] if word == "ENV")


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_of_the_image_asks_a_node(status: int) -> None:
    pages = {"/healthz": lambda _: Page(status, "text/plain", b"")}
    program = json.loads(str(last("cpu", "HEALTHCHECK")).partition("CMD ")[2])[2]
    with HealthServer("127.0.0.1:0", pages) as server:
        port = server.url.rpartition(":")[2]
        command = [sys.executable, "-c", program.replace("9464", port)]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode == 0) == (status == 200)


def test_the_images_install_extras_that_exist() -> None:
    extras = re.findall(r"^ARG EXTRAS=([\w,-]+)", TEXT, re.MULTILINE)
    extras += re.findall(r"EXTRAS=([\w,-]+)", (FOLDER / "README.md").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert len(extras) == 5
    assert {name for names in extras for name in names.split(",")} <= set(known)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for stage in STAGES.values():
        for words in (rest.split() for word, rest in stage if word == "COPY"):
            for source in words[:-1] if not words[0].startswith("--from") else []:
                assert list(ROOT.glob(source)), source
                assert source in kept


def read_yaml(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / name).read_text())


def test_each_service_of_the_compose_file_is_a_command_without_privileges() -> None:
    services = read_yaml("compose.yaml")["services"]
    assert set(services) == {"camera", "node", "console"}
    for name, service in services.items():
        assert command_parser().parse_args(service["command"]).run
        assert service["command"][0] == ("run" if name == "node" else name)
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["network_mode"] == "host", "no socket leaves loopback"
        assert ("healthcheck" in service) == (name != "node"), "the image's check is the node's"
        profile = re.fullmatch(r"\$\{SAM3_PROFILE:-(.+)\}:(.+):ro", service["volumes"][0])
        assert profile
        assert (FOLDER / profile[1]).is_file()
        assert profile[2] == service["command"][-1]


@pytest.mark.parametrize("profile", ["demo", "bench_robot", "realsense_bench", "jetson"])
def test_containers_reach_each_other_with_any_profile_of_one_camera(
    profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers share the network of the machine, and neither /tmp nor any other folder."""
    services = read_yaml("compose.yaml")["services"]
    for service in services.values():
        with monkeypatch.context() as patch:
            for name, value in service["environment"].items():
                patch.setenv(name, value)
            settings = load_settings(ROOT / "launch" / f"{profile}.toml")
        transport = settings.transport
        for endpoint in (*transport.frames, transport.masks, transport.control):
            assert endpoint.startswith("tcp://127.0.0.1:")
        assert settings.health.bind in ("", "127.0.0.1:9464"), "the image's health check asks there"
    assert services["node"]["environment"].items() >= services["camera"]["environment"].items()
    mounts = [volume.partition(":")[2] for volume in services["node"]["volumes"]]
    assert str(Path(services["node"]["environment"]["SAM3_SNAPSHOT__PATH"]).parent) in mounts


def test_the_compose_file_passes_the_flags_of_pip_to_the_build() -> None:
    """The file for GPUs is merged with it, and has them from there."""
    assert read_yaml("compose.yaml")["services"]["node"]["build"]["args"] == {"PIP_FLAGS": "${PIP_FLAGS:-}"}
    assert "ARG PIP_FLAGS=" in (ROOT / "launch/container/Containerfile").read_text()


def test_the_compose_file_builds_targets_of_the_container_file() -> None:
    node = read_yaml("compose.yaml")["services"]["node"]
    assert (FOLDER / node["build"]["context"] / node["build"]["dockerfile"]).samefile(
        FOLDER / "Containerfile"
    )
    gpu = read_yaml("compose.gpu.yaml")["services"]
    assert set(gpu) == {"node"}
    for build in (node["build"], gpu["node"]["build"]):
        assert build["target"] in STAGES
    (device,) = gpu["node"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_check_of_the_image_names_what_it_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "test"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert mentions(done.stderr, "buildah")


@pytest.mark.parametrize("stage", ["gpu", "cloud"])
def test_images_for_gpus_let_the_allocator_grow_its_segments(stage: str) -> None:
    """Sizes vary with the number of objects, and would leave gaps in the memory of a GPU."""
    names = [rest for word, rest in STAGES[stage] if word == "ENV"]
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True" in rest.split() for rest in names)

"""The measurements for the first minutes on a GPU, in small sizes on a CPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sam3_node.errors import DeviceError
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.repeats import if_whole
from tools.bench import gpu
from tools.bench.gpu import Journal, OutOfTimeError, read_lines

UNLIMITED = ["--dry-run", "--minutes", "1e4"]


dry_run = if_whole("a dry run of all figures takes a minute, and measures nothing that a user has")


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a dry run of all sections."""
    path = tmp_path_factory.mktemp("first") / "first.jsonl"
    assert gpu.main([*UNLIMITED, "--out", str(path)]) == 0, path.read_text()
    return path


@dry_run
def test_a_dry_run_measures_every_figure_of_every_section(journal: Path) -> None:
    lines = read_lines(journal)
    assert not [line for line in lines if "error" in line]
    assert {line["section"] for line in lines} == set(gpu.SECTIONS)
    assert max(Counter((line["section"], line["figure"]) for line in lines).values()) == 1
    values: list[Any] = []
    for line in lines:
        assert {"unit", "value", "device", "versions", "took_s", "date"} <= line.keys()
        values += line["value"].values() if isinstance(line["value"], dict) else [line["value"]]
    assert all(isinstance(value, float) and value >= 0 for value in values)


@dry_run
def test_a_run_that_was_killed_goes_on_where_it_was(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = journal.read_text()
    *kept, last = text.splitlines(keepends=True)
    journal.write_text("".join(kept) + last[: len(last) // 2])
    capsys.readouterr()
    assert gpu.main([*UNLIMITED, "--section", "node", "peer", "--out", str(journal)]) == 0
    (printed,) = capsys.readouterr().out.splitlines()
    assert json.loads(printed)["figure"] == json.loads(last)["figure"]
    assert [line["figure"] for line in read_lines(journal)] == [
        json.loads(line)["figure"] for line in [*kept, last]
    ]


def test_a_figure_is_cut_when_the_time_of_its_section_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait(journal: Journal) -> None:
        journal.measure("short", "s", lambda: 1)
        journal.measure("endless", "s", lambda: subprocess.run(["sleep", "1000"], check=True).returncode)

    sections = {"wait": gpu.Section(wait, 0.5), "next": gpu.Section(lambda journal: None, 0.5)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    path = tmp_path / "first.jsonl"
    assert gpu.main(["--dry-run", "--minutes", "0.02", "--out", str(path)]) == 3
    assert [line["figure"] for line in read_lines(path)] == ["short"]
    assert mentions(capsys.readouterr().err, "time", "wait")


def test_after_a_figure_that_loses_the_gpu_a_new_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> float:
        raise DeviceError("an illegal memory access")

    calls = list[list[str]]()
    path = tmp_path / "first.jsonl"
    one = gpu.Section(lambda journal: journal.measure("first", "ms", fail), 1.0)
    monkeypatch.setattr(gpu, "SECTIONS", {"one": one})
    monkeypatch.setattr(gpu.os, "execv", lambda file, words: calls.append(words[3:]))
    gpu.main(["--dry-run", "--out", str(path)])
    (words,) = calls
    assert gpu.arguments(words).out == path
    assert gpu.arguments(words).minutes <= gpu.MINUTES
    assert gpu.main(words) == 0, "the file has the figure"
    (line,) = read_lines(path)
    assert "illegal memory access" in line["traceback"]


def test_no_figure_begins_after_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first.jsonl"
    assert gpu.main(["--dry-run", "--minutes", "0", "--out", str(path)]) == 3
    assert not path.exists()
    said = capsys.readouterr().err
    assert all(f"time is over in {section}" in said for section in gpu.SECTIONS)


BARE = """torch transformers numpy opencv-python-headless msgpack msgspec safetensors prometheus-client pytest
hypothesis pyzmq zstandard lz4 pydantic-settings scipy tqdm packaging mcap mcap-protobuf-support
foxglove-schemas-protobuf"""
"""What a machine has on which nothing can be installed but a few wheels."""
BLOCK = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        spec = self.finder.find_spec(name, path, target)
        is_installed = path is None and spec is not None and "site-packages" in str(spec.origin)
        return None if is_installed and name not in BARE else spec

BARE = set(sys.argv.pop(1).split(","))
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


@cache
def list_bare_modules() -> str:
    """Return the top-level modules of BARE and of all that these packages require."""
    wanted = BARE.split()
    found = set[str]()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):  # a requirement of another platform
            requirements = map(Requirement, distribution(name).requires or ())
            wanted += [each.name for each in requirements if "extra" not in str(each.marker)]
    owners = packages_distributions().items()
    return ",".join(module for module, names in owners if found & set(map(canonicalize_name, names)))


def run_bare(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that can import the modules of BARE and this repository alone."""
    command = [sys.executable, "-c", BLOCK + script, list_bare_modules(), *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


@dry_run
def test_it_runs_with_few_packages(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    script = "from tools.bench import gpu\nsys.exit(gpu.main(sys.argv[1:]))"
    words = [*UNLIMITED, "--section", "together", "published", "--out", str(path)]
    done = run_bare(script, *words)
    assert done.returncode == 0, [line for line in read_lines(path) if "error" in line]
    assert {line["section"] for line in read_lines(path)} == {"together", "published"}


def test_the_tests_that_need_a_gpu_are_found_with_few_packages() -> None:
    """Naming their files leaves out files that import rosbags or pycocotools, which ended the collection."""
    script = "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    options = ["-p", "no:cacheprovider", "--collect-only", "--continue-on-collection-errors", "-m", "gpu"]
    done = run_bare(script, *options, *gpu.find_gpu_tests())
    assert "Interrupted" not in done.stdout
    files = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert files >= {"tests/perception/test_pipeline.py", "tests/tracking/test_tracker.py"}, done.stdout


def test_no_passed_test_is_a_failed_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, stdout: Any, **options: object) -> None:
        stdout.write("Interrupted: 5 errors during collection\n5 errors in 9.10s\n")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    path = tmp_path / "first.jsonl"
    assert gpu.main(["--dry-run", "--section", "tests", "--out", str(path)]) == 1
    (line,) = read_lines(path)
    assert mentions(line["error"], "no test")
    assert "5 errors" in line["error"]
    assert "5 errors" in path.with_suffix(".tests.txt").read_text()


def test_counts_of_pytest() -> None:
    counts = gpu.read_counts("2 failed, 11 passed, 1 error, 3 deselected in 4.05s")
    assert counts == {"passed": 11.0, "failed": 2.0, "errors": 1.0, "skipped": 0.0, "deselected": 3.0}


def test_a_figure_that_fails_is_a_line_and_the_next_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    journal = Journal(path, "together", gpu.choose_scale(dry=True), end_s=float("inf"), context={})

    def fail() -> float:
        raise RuntimeError("no kernel\nfor this GPU")

    journal.measure("first", "ms", fail)
    journal.measure("second", "ms", lambda: 2)
    first, second = read_lines(path)
    assert first["error"] == "RuntimeError: no kernel"
    assert "for this GPU" in first["traceback"]
    assert second["value"] == 2.0
    assert journal.errors == 1
    late = Journal(path, "together", journal.scale, end_s=0.0, context={})
    late.measure("second", "ms", fail)
    with pytest.raises(OutOfTimeError):
        late.measure("third", "ms", lambda: 3)

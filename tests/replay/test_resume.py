"""Replays killed with SIGKILL at random moments end with the results of one uninterrupted run."""

import hashlib
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam3_node.cli.main import main
from sam3_node.perception.perception import Perception
from sam3_node.replay.job import Job
from sam3_node.replay.run import compare_job, read_finished_summary, run_job
from sam3_node.replay.shards import ShardLimits
from sam3_node.replay.store import Summary
from tests.support.live import record_edits, tiny_settings
from tests.support.patience import PATIENCE_S
from tests.support.processes import Process, fork_command, forks, until
from tests.support.repeats import repetitions

KILLS = repetitions(4, 12)
FRAMES = 40
OUTPUTS = ("mcap", "coco", "png")
LIMITS = ShardLimits(frames=3)


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bag")
    return record_edits(folder / "live.mcap", Perception.load(tiny_settings(folder)), FRAMES)


@pytest.fixture(scope="module")
def whole(bag: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return the results of an uninterrupted run."""
    job = Job((str(bag),), str(tmp_path_factory.mktemp("whole") / "out"), "as-recorded", outputs=OUTPUTS)
    run_job(job)
    assert compare_job(job).is_identical
    return job


def work(job: Job, begun: Any) -> None:
    run_job(job, progress=lambda *_: begun.set(), limits=LIMITS)


def outputs_of(job: Job) -> dict[str, str]:
    """Return digests of all outputs."""
    out = Path(job.out)
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and "parts" not in path.parts]
    own = ("job.json", "summary.json", ".lock")
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name not in own
    }


def summary_of(job: Job) -> Summary:
    return Summary.from_json((Path(job.out) / "summary.json").read_bytes())


def test_labels_are_written_anew_without_doubtful_objects(bag: Path, tmp_path: Path) -> None:
    def reading(what: str, done: int, total: int | None) -> None:
        assert what.startswith("writing")

    # the strictest limit makes each mask doubtful
    settings = {"tracker": {"min_confidence": 1.0}}
    job = Job((str(bag),), str(tmp_path / "out"), outputs=OUTPUTS, settings=settings)
    run_job(job)
    before = outputs_of(job)
    assert any(row["doubtful"] for row in annotations_of(job))
    # no frame is stepped again, and only the labels change
    sure = replace(job, doubtful="left-out")
    assert read_finished_summary(sure) is None
    run_job(sure, progress=reading)
    assert not any(row["doubtful"] for row in annotations_of(sure))
    assert read_finished_summary(sure)
    run_job(job, progress=reading)
    assert outputs_of(job) == before


def annotations_of(job: Job) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((Path(job.out) / "masks.json").read_text())["annotations"]
    return rows


def test_an_option_of_doubtful_objects_needs_an_output_that_follows_it(
    bag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, wanted in (("--sure-only", "coco"), ("--with-doubtful", "png")):
        assert main(["replay", str(bag), "-o", str(tmp_path / "out"), option]) == 2
        message = capsys.readouterr().err
        assert option in message
        assert wanted in message


@pytest.mark.timeout(1200)
def test_killed_replays_end_with_the_same_results(bag: Path, whole: Job, tmp_path: Path) -> None:
    moments = random.Random(6)
    kills = finished = resumed = 0
    job = whole
    while kills < KILLS or not read_finished_summary(job):
        if job is whole or read_finished_summary(job):
            job = Job(whole.bags, str(tmp_path / str(kills)), "as-recorded", outputs=OUTPUTS)
        begun = forks.Event()
        process = forks.Process(target=work, args=(job, begun))
        process.start()
        assert begun.wait(PATIENCE_S)
        process.join(moments.uniform(0.0, 1.0) if kills < KILLS else None)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if read_finished_summary(job):
            finished += 1
            resumed += summary_of(job).resumed_from > 0
            assert outputs_of(job) == outputs_of(whole)
            assert summary_of(job).frames == summary_of(whole).frames
            assert compare_job(job).is_identical
    assert finished >= 1
    assert resumed >= 1


@pytest.mark.timeout(1200)
def test_the_command_stops_at_a_signal_and_continues(bag: Path, whole: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["replay", str(bag), "-o", str(out), "--as-recorded", "--outputs", ",".join(OUTPUTS)]
    with Process(fork_command(command, os.environ, log := tmp_path / "log")) as replay:
        until(lambda: (out / ".replay/job.json").exists(), "the beginning")
        time.sleep(0.2)
        replay.process.send_signal(signal.SIGINT)
        code = replay.process.wait(PATIENCE_S)
        assert code in (130, 0), log.read_text()
        if code == 130:
            assert replay.line_with("Run the same command to resume.")
            assert not summary_of(Job((str(bag),), str(out))).complete
    assert main(command) == 0
    assert outputs_of(Job((str(bag),), str(out))) == outputs_of(whole)

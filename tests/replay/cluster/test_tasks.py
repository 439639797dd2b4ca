"""Plans, reports and progress of many replays, and the files in launch/cloud/, without Ray."""

import json
import re
import shlex
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sam3_node.cli.progress import align_rows
from sam3_node.errors import ReplayError
from sam3_node.replay.cluster.bill import OUTLIVES_S, BagResult, UsageReport
from sam3_node.replay.cluster.scheduler import ThroughputMeter, connect_ray
from sam3_node.replay.cluster.tasks import JobPlan, ProbeResult, Split, probe_recording
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.schedule import open_schedule
from tests.support.command_line import command_parser
from tests.support.mcap_files import colour_pixels, depth_pixels, raw, write_ros2
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tools.bench.processes import free_ports

NO_RAY = "Ray is not installed, which the extra 'cloud' brings"
CLOUD = ROOT / "launch" / "cloud"
JOB = Job(("a.mcap",), "out", names=("mug",))
BOX = ObjectOnFrame(box=(1, 2, 3, 4))


def test_a_whole_recording_is_one_task() -> None:
    steps = JobPlan(JOB).steps()
    (task,) = next(steps)
    assert (task.kind, task.job) == ("replay", JOB)
    with pytest.raises(StopIteration) as end:
        steps.send(["summary"])
    assert end.value.value == ["summary"]


def test_again_clears_results_once() -> None:
    steps = JobPlan(JOB, again=True).steps()
    assert [task.kind for task in next(steps)] == ["clear"]
    assert [task.kind for task in steps.send([None])] == ["replay"]


def test_each_camera_is_a_job() -> None:
    steps = JobPlan(JOB, Split(by_camera=True)).steps()
    assert [task.kind for task in next(steps)] == ["probe"]
    tasks = steps.send([ProbeResult(("left", "right"), 20)])
    found = [(task.job.topics, task.job.out) for task in tasks]
    assert found == [(("left",), "out/left"), (("right",), "out/right")]


def test_each_camera_keeps_the_topics_that_are_not_of_another(tmp_path: Path) -> None:
    """A depth topic that the user has chosen stays chosen; the other camera does not come with it."""
    moments = []
    for side in ("left", "right"):
        moments.append(raw(colour_pixels(0), "bgr8", topic=f"/{side}/color/image_raw"))
        moments.append(raw(depth_pixels(0), "16UC1", topic=f"/{side}/depth/image_rect_raw"))
    path = write_ros2(tmp_path / "two.mcap", moments)
    chosen = ("left", "/right/color/image_raw", "/left/depth/image_rect_raw")
    job = Job((str(path),), str(tmp_path / "out"), topics=chosen, names=("mug",))
    size = probe_recording(job, lambda *_: None, threading.Event())
    assert size.cameras == ("left", "right")
    steps = JobPlan(job, Split(by_camera=True)).steps()
    next(steps)
    found = {task.job.out.rpartition("/")[2]: task.job.topics for task in steps.send([size])}
    assert found["left"] == ("left", "/left/depth/image_rect_raw")
    assert found["right"][:2] == ("right", "/right/color/image_raw")
    with open_schedule(replace(job, topics=found["right"])) as schedule:
        assert schedule.cameras == ("right",)


def test_a_camera_has_its_own_objects() -> None:
    shown = replace(BOX, camera="left")
    steps = JobPlan(Job(("a",), "out", objects=(shown,)), Split(by_camera=True)).steps()
    next(steps)
    (task,) = steps.send([ProbeResult(("left", "right"), 20)])
    assert (task.job.topics, task.job.objects) == (("left",), (shown,))


def test_objects_of_no_camera_are_left_to_a_whole_replay() -> None:
    steps = JobPlan(Job(("a",), "out", objects=(replace(BOX, camera="top"),)), Split(by_camera=True)).steps()
    next(steps)
    (task,) = steps.send([ProbeResult(("left", "right"), 20)])
    assert task.job.out == "out"


def test_segments_are_replayed_at_once_and_then_joined() -> None:
    steps = JobPlan(replace(JOB, start=5), Split(frames=10, overlap=4)).steps()
    next(steps)
    segments = [task.job for task in steps.send([ProbeResult(("left",), 20)])]
    assert [(job.start, job.stop) for job in segments] == [(5, 15), (11, 21), (17, 25)]
    assert all(job.outputs == () for job in segments)
    assert len({job.out for job in segments}) == 3
    (task,) = steps.send([None] * 3)
    assert task.kind == "join"
    assert task.segments == tuple(segments)


@each_row(
    ("job", "split", "text"),
    [
        (JOB, Split(frames=10, overlap=-1), "an overlap of 0 to 9"),
        (JOB, Split(frames=10, overlap=10), "an overlap of 0 to 9"),
        (Job(("a",), "o", "as-recorded"), Split(frames=10), "as a whole"),
        (Job(("a",), "o", "as-recorded"), Split(by_camera=True), "as a whole"),
        (Job(("a",), "o", objects=(BOX,)), Split(frames=10), "segments need names"),
        (Job(("a",), "o"), Split(frames=10), "segments need names"),
        (Job(("a",), "o"), Split(by_camera=True), "all cameras at once"),
        (Job(("a",), "o", objects=(BOX,)), Split(by_camera=True), "found one without"),
    ],
)
def test_a_job_that_cannot_be_divided_is_an_error(job: Job, split: Split, text: str) -> None:
    with pytest.raises(ReplayError, match=text):
        split.check(job)


def test_a_usage_report_adds_up() -> None:
    done = BagResult("a.mcap", "out/a", "done", None, 100, 1800.0)
    failed = BagResult("b.mcap", "out/b", "failed", "no frames", 0, 900.0, losses=2)
    bill = UsageReport([done, failed], 2000.0, 3600.0, 3600.0, 3.0)
    assert not bill.is_complete
    assert not bill.is_stopped
    found = json.loads(bill.to_json())
    assert found["frames"] == 100
    assert found["cost"] == 3.0
    assert [bag["cost"] for bag in found["bags"]] == [1.5, 0.75]
    lines = align_rows(bill.rows())
    assert lines[1].split() == ["a.mcap", "100", "1800.0", "1.5000", "done"]
    assert lines[2].endswith("failed, 2 workers lost: no frames")
    assert lines[3].split() == ["waiting", "900.0", "0.7500"]
    assert lines[4].split()[:4] == ["all", "100", "3600.0", "3.0000"]
    assert "cost" not in UsageReport([done], 1.0, 1.0, 0.0).rows()[0]


def test_a_resumed_run_adds_to_the_bill() -> None:
    killed = BagResult("a.mcap", "out/a", "running", None, 0, 100.0, losses=1)
    other = BagResult("c.mcap", "out/c", "done", None, 50, 30.0)
    first = UsageReport.from_json(UsageReport([killed, other], 120.0, 150.0, 150.0, 2.0).to_json().encode())
    done = BagResult("a.mcap", "out/a", "done", None, 100, 20.0)
    fresh = BagResult("b.mcap", "out/b", "done", None, 10, 5.0)
    bill = UsageReport([done, fresh], 30.0, 50.0, 0.0, 4.0).after(first)
    assert [(bag.bag, bag.worker_s, bag.losses) for bag in bill.bags] == [
        ("a.mcap", 120.0 + OUTLIVES_S, 2),
        ("b.mcap", 5.0, 0),
    ]
    assert [bag.bag for bag in bill.others] == ["c.mcap"]
    # the worker of a killed driver goes on for a while, and nobody measures it
    first_s = 150.0 + OUTLIVES_S
    assert (bill.seconds, bill.held_s, bill.gpu_s, bill.runs) == (150.0, first_s + 50.0, first_s, 2)
    # each run at its own price
    assert bill.cost(bill.held_s) == pytest.approx((first_s * 2 + 50.0 * 4) / 3600, abs=1e-5)
    assert bill.is_complete
    lines = align_rows(bill.rows())
    assert "2 workers lost" in lines[1]
    assert lines[3].startswith("c.mcap")
    assert lines[-1].endswith("of 2 runs")
    third = UsageReport([], 0.0, 0.0, 0.0).after(UsageReport.from_json(bill.to_json().encode()))
    assert (third.runs, third.price_per_hour) == (3, bill.price_per_hour)
    assert {bag.bag for bag in third.others} == {"a.mcap", "b.mcap", "c.mcap"}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"bags": [3], "seconds": 1, "held_s": 1, "gpu_s": 1}', '{"bags": [], "seconds": "a"}'],
)
def test_a_file_that_is_no_bill_is_refused(text: str) -> None:
    with refuses(ReplayError, field="bill.json"):
        UsageReport.from_json(text.encode())


def test_frames_of_earlier_runs_are_not_counted_again() -> None:
    meter = ThroughputMeter(3)
    assert meter.left_s is None
    meter.update("a", "replaying", 40, 100)
    meter.update("a", "replaying", 60, 100)
    meter.update("a", "replaying", 50, 100)  # its worker was lost
    meter.update("b", "writing mcap", 90, 100)
    assert meter.frames == 20
    assert meter.left_s is not None
    meter.finish("a", 100, 30)
    meter.finish("b", 70, 0)
    assert meter.frames == 140


def test_the_cluster_file_is_what_ray_takes() -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ray", reason=NO_RAY)
    from ray.autoscaler._private.util import validate_config

    cluster = yaml.safe_load((CLOUD / "cluster.yaml").read_text())
    validate_config(cluster)
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"]["CPU"] == 0
    assert types["gpu"]["min_workers"] == 0
    assert types["gpu"]["resources"]["GPU"] == 1


@pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell")
def test_a_submitted_job_is_a_replay_on_the_cluster(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$RAY_ADDRESS" "$@"\n')
    ray.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [CLOUD / "submit", "s3://bags/a b.mcap", "-o", "s3://out", "--prompt", "red mug"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    address, *words = done.stdout.splitlines()
    assert address == "http://127.0.0.1:8265"
    assert words[:4] == ["job", "submit", "--", "sam3-node"]
    args = command_parser().parse_args(words[4:])
    assert (args.ray, args.bags, args.names) == ("auto", ["s3://bags/a b.mcap"], ["red mug"])


def test_the_task_of_skypilot_is_a_replay_on_a_spot_machine() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((CLOUD / "skypilot.yaml").read_text())
    resources = task["resources"]
    variables = task["envs"]
    assert resources["use_spot"]
    assert set(resources["accelerators"].values()) == {1}
    image, stage = resources["image_id"].rsplit(":", 1)
    assert image.startswith("docker:")
    assert f" AS {stage}\n" in (CLOUD.parent / "container" / "Containerfile").read_text()
    script = task["run"].replace("exec /opt/sam3-node/.venv/bin/sam3-node", "printf '%s\\n'")
    environment = {"BAGS": "s3://bags/a.mcap s3://bags/b.mcap", "OUT": "s3://out", "PATH": "/usr/bin:/bin"}
    command = ["sh", "-ec", script]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    args = command_parser().parse_args(done.stdout.splitlines())
    assert (args.bags, args.out) == (["s3://bags/a.mcap", "s3://bags/b.mcap"], "s3://out")
    assert set(variables) == set(re.findall(r"\$([A-Z]+)", task["run"]))


def test_documented_commands_are_valid() -> None:
    text = (CLOUD / "README.md").read_text()
    found = re.findall(r"(?:sam3-node replay|launch/cloud/submit) (.+)", text)
    assert len(found) == 3
    for words in found:
        assert command_parser().parse_args(["replay", *shlex.split(words)]).bags


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_without_ray_is_an_error_at_once(address: str) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    (port,) = free_ports(1)
    with refuses(ReplayError, field=("Ray", "cluster")), connect_ray(address.format(port), 1):
        pass


@pytest.mark.parametrize(
    ("values", "is_warned"),
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "secret"}, True),
        ({"RAY_AUTH_MODE": "token"}, False),
        ({"RAY_AUTH_TOKEN": "secret"}, False),
    ],
)
def test_a_cluster_without_a_token_is_warned_of(
    values: dict[str, str],
    is_warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ReplayError), connect_ray("127.0.0.1:1", 1):
        pass
    assert (mentions(caplog.text, "token")) == is_warned


def test_clusters_of_launch_start_with_a_token() -> None:
    text = (CLOUD / "cluster.yaml").read_text()
    starts = [line for line in text.splitlines() if "ray start" in line]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token ray start" in line for line in starts)
    assert "~/.ray/auth_token: ~/.ray/auth_token" in text
    assert "export RAY_ADDRESS RAY_AUTH_MODE" in (CLOUD / "submit").read_text()

"""Replays on a local Ray give the same results as without, also when workers and drivers are killed."""

import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.cli import main as cli
from sam3_node.errors import ReplayError
from sam3_node.geometry import mask_intersection
from sam3_node.replay.cluster import scheduler
from sam3_node.replay.cluster.bill import UsageReport
from sam3_node.replay.cluster.scheduler import RunProgress, connect_ray, run_many
from sam3_node.replay.cluster.tasks import Split
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.shards import ShardLimits
from sam3_node.settings import Settings
from sam3_node.types import MaskFrame
from sam3_node.wire import pack_masks
from tests.support.live import BOX, chosen, moving_frame
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.threads import in_thread

pytest.importorskip("ray", reason="Ray is not installed, which the extra 'cloud' brings")
pytestmark = pytest.mark.timeout(1200)

FRAMES = 60
SMALL = ShardLimits(frames=5)
OUTPUTS = ("mcap", "coco")
FILES = ("masks.mcap", "masks.json")


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with connect_ray("local", 2) as found:
        yield found


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask workers for their progress several times within a recording, which takes part of a second."""
    monkeypatch.setattr(scheduler, "POLL_S", 0.02)


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three recordings, of two cameras, one camera, and one camera."""
    folder = tmp_path_factory.mktemp("bags")
    paths = [folder / f"{name}.mcap" for name in "abc"]
    for path, cameras in zip(paths, (("left", "right"), ("left",), ("right",)), strict=True):
        with RecordingWriter(path) as writer:
            for seq in range(FRAMES // len(cameras)):
                for camera in cameras:
                    writer.write_frame(moving_frame(seq, camera), seq + 1)
    return paths


@pytest.fixture(scope="module")
def expected(bags: list[Path], settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of plain replays."""
    out = tmp_path_factory.mktemp("expected")
    load = PerceptionCache()
    for job in job_of(bags, out, settings).split_by_recording():
        run_job(job, load)
    return out


def job_of(bags: Sequence[Path], out: Path | str, settings: Settings) -> Job:
    shown = ObjectOnFrame(box=tuple(BOX))  # type: ignore[arg-type]
    return Job(tuple(map(str, bags)), str(out), objects=(shown,), outputs=OUTPUTS, settings=chosen(settings))


def run(job: Job, **options: Any) -> Any:
    return run_many(job.split_by_recording(), "local", limits=SMALL, **options)


def assert_same(found: Path, expected: Path) -> None:
    for name in FILES:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), found


def workers() -> list[psutil.Process]:
    """Return the workers of this process's Ray."""
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.name() == "ray::Worker" and one.status() != psutil.STATUS_ZOMBIE]


class SignalOneWorker:
    """Sends a worker a signal, once, when more than the first part has been replayed: a `progress` of `run`."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self.sent = False

    def __call__(self, found: RunProgress) -> None:
        if found.frames > SMALL.frames and not self.sent:
            workers()[0].send_signal(self._number)
            self.sent = True


@contextmanager
def killing(times: int, begun: Callable[[], bool]) -> Iterator[list[int]]:
    """Kills workers several times, at random moments after a replay has begun."""
    killed: list[int] = []

    def kill(over: threading.Event) -> None:
        generator = random.Random(7)
        while len(killed) < times and not over.wait(generator.uniform(0.05, 0.5)):
            fresh = [one for one in workers() if one.pid not in killed]
            if begun() and fresh:
                one = generator.choice(fresh)
                one.kill()
                killed.append(one.pid)

    with in_thread(kill):
        yield killed


def test_many_recordings_give_the_results_of_single_replays(
    bags: list[Path], settings: Settings, expected: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.mcap"
    broken.write_bytes(bags[0].read_bytes()[:100])
    seen: list[RunProgress] = []
    job = job_of([bags[0], broken, *bags[1:]], f"file://{tmp_path}/out", settings)
    bill = run(job, progress=seen.append, price_per_hour=36.0)
    assert [bag.state for bag in bill.bags] == ["done", "failed", "done", "done"]
    assert [bag.frames for bag in bill.bags] == [FRAMES, 0, FRAMES, FRAMES]
    assert "broken.mcap" in (bill.bags[1].error or "")
    assert not bill.is_complete
    assert bill.frames == 3 * FRAMES
    assert bill.held_s >= max(bag.worker_s for bag in bill.bags)
    assert bill.cost(bill.held_s) == pytest.approx(bill.held_s / 100)
    for name in "abc":
        assert_same(tmp_path / "out" / name, expected / name)
    assert seen[-1].done == 4
    assert seen[-1].frames == 3 * FRAMES
    assert max(one.workers for one in seen) == 2
    assert not psutil.wait_procs(workers(), timeout=PATIENCE_S)[1]


def test_killed_workers_cost_no_frame(
    bags: list[Path], settings: Settings, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with killing(3, lambda: any(out.glob("*/.replay/parts/*.masks"))) as killed:
        bill = run(job_of(bags, out, settings))
    assert len(killed) == 3
    assert bill.is_complete
    assert sum(bag.losses for bag in bill.bags) >= 1
    assert [bag.frames for bag in bill.bags] == [FRAMES] * 3
    for name in "abc":
        assert_same(out / name, expected / name)


def test_an_interrupted_worker_hands_its_task_on(
    bags: list[Path], settings: Settings, expected: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A spot machine that is taken away sends SIGTERM. It is a loss, but no failure, so it needs no retry."""
    out = tmp_path / "out"
    interrupt = SignalOneWorker(signal.SIGTERM)
    report = run(job_of(bags[:2], out, settings), workers=1, retries=0, progress=interrupt)
    assert interrupt.sent
    assert mentions(caplog.text, "interrupted")
    assert report.is_complete
    assert sum(bag.losses for bag in report.bags) == 1
    assert mentions(str(report.rows()), "1 worker lost")
    for name in "ab":
        assert_same(out / name, expected / name)
    assert not psutil.wait_procs(workers(), timeout=PATIENCE_S)[1]


def test_lost_and_stopped_jobs_continue(
    bags: list[Path], settings: Settings, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stop = threading.Event()
    job = job_of(bags[:2], out, settings)
    kill = SignalOneWorker(signal.SIGKILL)
    lost = run(job, retries=0, progress=kill)
    assert kill.sent
    assert [bag.state for bag in lost.bags].count("failed") == 1
    assert mentions("".join(bag.error or "" for bag in lost.bags), "1", "workers")

    job = job_of(bags, out, settings)
    stopped = run(job, workers=1, progress=lambda found: stop.set() if found.frames > 5 else None, stop=stop)
    assert stopped.is_stopped
    assert not stopped.is_complete
    assert any(mentions(bag.error or "", "saved") for bag in stopped.bags)

    seen: list[RunProgress] = []
    saved: list[UsageReport] = []
    bill = run(job, workers=1, progress=seen.append, earlier=stopped.after(lost), save=saved.append)
    assert bill.is_complete
    assert seen[-1].frames < bill.frames == 3 * FRAMES
    # the bill has all three runs, and the worker that was killed
    assert bill.runs == 3
    assert bill.held_s > stopped.held_s + lost.held_s
    assert sum(bag.losses for bag in bill.bags) == 1
    assert sum(bag.worker_s for bag in bill.bags) <= bill.held_s + 1
    assert all(report.held_s <= bill.held_s and report.runs == 3 for report in saved)
    assert any(bag.state == "running" for report in saved for bag in report.bags)
    for name in "abc":
        assert_same(out / name, expected / name)


def test_an_error_of_the_driver_leaves_a_bill_without_running_tasks(
    bags: list[Path], settings: Settings, tmp_path: Path
) -> None:
    saved: list[UsageReport] = []

    def fail(found: RunProgress) -> None:
        if found.frames > 5:
            raise RuntimeError("the bar is broken")

    with refuses(RuntimeError, field="broken"):
        run(job_of(bags[:1], tmp_path / "out", settings), progress=fail, save=saved.append)
    assert [bag.state for bag in saved[-1].bags] == ["stopped"]
    assert saved[-1].held_s > 0
    assert saved[-1].bags[0].after(saved[-1].bags[0]).losses == 0


def test_segments_keep_the_ids_of_those_before(tmp_path: Path) -> None:
    job = Job((str(TABLETOP),), str(tmp_path / "cut"), names=("mug", "bottle"), stop=36)
    job = replace(job, settings={"model": {"threads": 1}})
    whole = replace(job, out=str(tmp_path / "whole"))
    run_job(whole)
    bill = run(job, split=Split(frames=20, overlap=6))
    assert bill.is_complete
    assert bill.frames == 36
    stitched, expected = (list(read_masks(tmp_path / name / "masks.mcap")) for name in ("cut", "whole"))
    assert [masks.seq for masks in stitched] == [masks.seq for masks in expected] == list(range(36))
    begun = {one.id for one in stitched[13].instances}
    assert len(begun) >= 2
    for found, other in zip(stitched, expected, strict=True):
        known = {one.id: one for one in other.instances}
        for one in found.instances:
            if one.id in begun and one.area:
                assert one.label == known[one.id].label
                assert mask_intersection(one.mask, known[one.id].mask) > 0.5 * one.area, (found.seq, one.id)
    with refuses(ReplayError, field="job.segments"):
        run_job(job)


def test_the_command_reports_the_cost_of_each_recording(
    bags: list[Path], settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = [(section, *item) for section, values in chosen(settings).items() for item in values.items()]
    options = [f"--{section}.{name}={value}" for section, name, value in fields]
    out = tmp_path / "out"
    objects = tmp_path / "objects.json"
    shown = tuple(ObjectOnFrame(camera=camera, box=tuple(BOX)) for camera in ("left", "right"))  # type: ignore[arg-type]
    objects.write_text(json.dumps([{"camera": one.camera, "box": one.box} for one in shown]))
    command = ["replay", str(bags[0]), str(tmp_path / "none.mcap"), "-o", str(out), *options]
    command += ["--objects", str(objects), "--by-camera"]
    assert cli.main(command) == 2
    # an option that would be ignored is refused
    for option, value in (("--price-per-hour", "0"), ("--workers", "1"), ("--gpus-per-worker", "0")):
        capsys.readouterr()
        assert cli.main(["replay", str(bags[0]), "-o", str(out), option, value]) == 2
        assert mentions(capsys.readouterr().err, option, "--ray")
    assert cli.main([*command, "--ray", "local", "--workers", "1", "--price-per-hour", "1"]) == 1
    assert mentions(capsys.readouterr().out, "failed", "recording")
    bill = json.loads((out / "bill.json").read_text())
    assert [bag["state"] for bag in bill["bags"]] == ["done", "failed"]
    assert bill["frames"] == FRAMES
    whole = replace(job_of(bags[:1], tmp_path / "whole", settings), objects=shown)
    run_job(whole)
    both = [item for camera in ("left", "right") for item in read_masks(out / "a" / camera / "masks.mcap")]
    alone = read_masks(tmp_path / "whole/masks.mcap")
    assert [*map(untimed, sorted(both, key=order))] == [*map(untimed, sorted(alone, key=order))]


def order(masks: MaskFrame) -> tuple[str, int]:
    return masks.camera, masks.seq


def untimed(masks: MaskFrame) -> list[Any]:
    return pack_masks(replace(masks, stages_us={}, published_ns=0))

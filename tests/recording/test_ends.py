"""However `sam3-node record` ends, only the last moment is lost, and the loss is reported."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from sam3_node.bags.native import RECORDING
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.transport import MaskPublisher
from tests.support.node_rig import READY_S, until
from tests.support.recorder_rig import FRAME_BYTES, Camera, RecorderProcess, arguments, has_grown, read_seqs
from tests.support.repeats import repetitions
from tests.support.wire_examples import masks

MEBIBYTE = 1 << 20
KILLS, AT_ONCE = repetitions(5, 20), 5


@pytest.mark.parametrize("batch", range(KILLS // AT_ONCE))
def test_a_kill_costs_less_than_one_and_a_half_mebibytes(tmp_path: Path, batch: int) -> None:
    rng = random.Random(batch)
    paths = [tmp_path / f"{number}.mcap" for number in range(AT_ONCE)]
    with (
        Camera(f"ipc://{tmp_path}/frames", rate=20 + 8 * batch) as camera,
        MaskPublisher(f"ipc://{tmp_path}/masks") as node,
        ExitStack() as opened,
    ):
        verbs = [opened.enter_context(RecorderProcess(arguments(tmp_path, path))) for path in paths]
        for verb, path in zip(verbs, paths, strict=True):
            verb.line_with("record frames from")
            until(has_grown(path, FRAME_BYTES), "frames on the disk", READY_S)
        for verb, path in zip(verbs, paths, strict=True):
            node.send(masks())
            time.sleep(rng.uniform(0, 1.5))
            sent = camera.sent
            verb.process.send_signal(signal.SIGKILL)
            verb.process.wait(timeout=120)
            recorded = RecordingReader([path])
            seqs = read_seqs(path)
            assert (sent - seqs[-1]) * FRAME_BYTES < 1.5 * MEBIBYTE
            assert seqs == sorted(set(seqs))
            list(recorded.actions())
            assert recorded.lost is not None


def test_after_a_kill_a_new_recording_works(tmp_path: Path) -> None:
    with Camera(f"ipc://{tmp_path}/frames", rate=50):
        for name, end in (("a.mcap", signal.SIGKILL), ("b.mcap", signal.SIGTERM)):
            with RecorderProcess(arguments(tmp_path, tmp_path / name)) as verb:
                until(has_grown(tmp_path / name, 5 * FRAME_BYTES), "frames on the disk", READY_S)
                verb.process.send_signal(end)
                assert verb.process.wait(timeout=120) == (-end if end == signal.SIGKILL else 0)
    assert read_seqs(tmp_path / "b.mcap")[0] > read_seqs(tmp_path / "a.mcap")[-1]
    assert RecordingReader([tmp_path / "b.mcap"]).metadata()[RECORDING]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_file(tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "r.mcap"
    with (
        Camera(f"ipc://{tmp_path}/frames", rate=50),
        RecorderProcess(arguments(tmp_path, path, record__split_mb=0.2)) as verb,
    ):
        until(has_grown(tmp_path / "r_0002.mcap", FRAME_BYTES), "a third file", READY_S)
        verb.process.send_signal(end)
        assert verb.process.wait(timeout=120) == 0
    paths = sorted(tmp_path.glob("*.mcap"), key=lambda found: (len(found.name), found.name))
    seqs = [seq for part in paths for seq in read_seqs(part)]
    recorded = RecordingReader(paths)
    counts = recorded.metadata()[RECORDING][-1]["cameras"]["cam0"]
    assert counts["frames"] == len(seqs)
    assert counts["frames_lost"] == seqs[-1] - seqs[0] + 1 - len(seqs)
    assert [found.seq for found in recorded.frames()] == seqs
    assert recorded.lost is None


def test_a_full_disk_ends_it_and_spares_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    limited = ["bash", "-c", 'ulimit -f 2500; exec "$@"', "bash", *arguments(tmp_path, path)]
    with Camera(f"ipc://{tmp_path}/frames", rate=60) as camera, RecorderProcess(limited) as verb:
        assert verb.process.wait(timeout=READY_S) == 2
        assert camera.sent > 0
        verb.line_with(" MB in ")
        verb.line_with(f"cannot write {path}: File too large; the recording ends here")
    recorded = RecordingReader([path])
    seqs = read_seqs(path)
    assert len(seqs) * FRAME_BYTES > 1_000_000
    assert list(recorded.frames())
    assert recorded.lost is None


def test_what_a_stopped_recorder_misses_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    with (
        Camera(f"ipc://{tmp_path}/frames", rate=100, size=100_000) as camera,
        RecorderProcess(arguments(tmp_path, path)) as verb,
    ):
        until(has_grown(path, 500_000), "frames on the disk", READY_S)
        verb.process.send_signal(signal.SIGSTOP)
        begin = camera.sent
        until(lambda: camera.sent > begin + 250, "frames that nobody takes", READY_S)
        verb.process.send_signal(signal.SIGCONT)
        verb.line_with("; lost: cam0")  # said at once, not only at the end
        assert verb.terminate() == 0
    seqs = read_seqs(path)
    counts = RecordingReader([path]).metadata()[RECORDING][0]["cameras"]["cam0"]
    assert counts["frames"] == len(seqs)
    assert counts["frames_lost"] == seqs[-1] - seqs[0] + 1 - len(seqs) > 50
    assert f"; lost: cam0 {counts['frames_lost']} frames" in verb.line_with(" MB in ")


def test_nobody_has_to_read_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    with Camera(f"ipc://{tmp_path}/frames", rate=50):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(arguments(tmp_path, path), **pipes)
        try:
            assert process.stdout is not None
            process.stdout.close()
            until(has_grown(path, 5 * FRAME_BYTES), "frames on the disk", READY_S)
        finally:
            process.terminate()
            assert process.wait(timeout=120) == 0
    assert RecordingReader([path]).metadata()[RECORDING]

"""The quota deletes the oldest files that the recorder itself made, and nothing else."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from sam3_node.bags.native import RECORDER
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.recording.recorder import Quota
from sam3_node.settings import RecordSettings
from tests.recording.test_recorder import recording, settings_for
from tests.support.node_rig import READY_S, until
from tests.support.recorder_rig import FRAME_BYTES, Camera, frame, read_seqs

SIZE = 100_000


def write(path: Path, age_s: float, own: bool = True) -> Path:
    with RecordingWriter(path) as writer:
        if own:
            writer.write_metadata(RECORDER, {"began_ns": 0})
        writer.write_frame(frame(0, SIZE), 1)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def strangers(tmp_path: Path) -> list[Path]:
    """Return files that no quota of the folder concerns, all old."""
    target = write(tmp_path / "kept.mcap", 9000)
    link = tmp_path / "20200101T000000Z.mcap"
    link.symlink_to(target)
    replayed = write(tmp_path / "20200101T000001Z.mcap", 9000, own=False)
    damaged = tmp_path / "20200101T000002Z.mcap"
    damaged.write_bytes(bytes(SIZE))
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    inner = write(tmp_path / "sub/20200101T000003Z.mcap", 9000)
    others = [target, link, replayed, damaged, text, inner]
    return [*others, write(tmp_path / "x20200101T000003Z.mcap", 9000)]


def test_the_oldest_go_first_and_nothing_else(tmp_path: Path, strangers: list[Path]) -> None:
    own = [write(tmp_path / f"20260101T00000{n}Z.mcap", 1000 - n) for n in range(5)]
    own.append(write(tmp_path / "20260101T000009Z_0001.mcap", 10))
    quota = Quota(RecordSettings(out=tmp_path, max_total_gb=(5 * SIZE + SIZE // 2) / 1e9))
    assert quota.enforce(own[-1]) == own[:3]  # the damaged file and the stranger's one count, but stay
    assert [path for path in own if path.exists()] == own[3:]
    assert all(os.path.lexists(path) for path in strangers)
    assert quota.enforce(own[-1]) == []


def test_files_that_are_too_old_go(tmp_path: Path, strangers: list[Path]) -> None:
    own = [write(tmp_path / f"20260101T00000{n}Z.mcap", age) for n, age in enumerate((7300, 7100, 10))]
    assert Quota(RecordSettings(out=tmp_path, max_age_h=2)).enforce(None) == own[:1]
    assert Quota(RecordSettings(out=tmp_path)).enforce(None) == []
    assert all(os.path.lexists(path) for path in strangers)


def test_files_of_one_name_are_those_of_its_series(tmp_path: Path) -> None:
    own = [
        write(tmp_path / name, 9000) for name in ("a.b.mcap", "a.b_0001.mcap", "a.b-20260101T000000Z.mcap")
    ]
    others = [write(tmp_path / name, 9000) for name in ("axb.mcap", "a.b2.mcap", "20260101T000000Z.mcap")]
    assert set(Quota(RecordSettings(out=tmp_path / "a.b.mcap", max_age_h=1)).enforce(None)) == set(own)
    assert all(path.exists() for path in others)


def test_neither_the_current_file_nor_that_of_another_recorder_is_deleted(tmp_path: Path) -> None:
    current = write(tmp_path / "20260101T000000Z.mcap", 9000)
    quota = Quota(RecordSettings(out=tmp_path, max_age_h=1, max_total_gb=1e-9))
    with RecordingWriter(tmp_path / "20260101T000001Z.mcap") as other:
        other.write_metadata(RECORDER, {})
        assert quota.enforce(current) == []
    assert quota.enforce(current) == [other.path]


def test_a_recorder_keeps_to_its_quota_and_splits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sam3_node.recording.recorder.PROGRESS_S", 0.05)
    settings = settings_for(tmp_path, max_total_gb=20 * FRAME_BYTES / 1e9)
    with Camera(f"ipc://{tmp_path}/frames", rate=100), recording(settings) as out:
        until(lambda: out.getvalue().count("deleted ") > 5, "deleted files", READY_S)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.mcap")) < 40 * FRAME_BYTES
    assert not (tmp_path / "r.mcap").exists()
    assert all(read_seqs(path) for path in tmp_path.glob("*.mcap"))
    shutil.rmtree(tmp_path)

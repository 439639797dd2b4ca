"""A labelled clip: images, truth and names by index, also past the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sam3_node.errors import BagError

pytest.importorskip("mcap")

from sam3_node.bags import LabelledClip, RecordingReader, RecordingWriter
from sam3_node.cameras.playback import TABLETOP
from tests.support.recordings import SIZE, frame_at, make_truth, write_recording
from tests.support.refuses import refuses


def test_images_and_truth_are_those_of_the_index(tmp_path: Path) -> None:
    recording = LabelledClip.load(write_recording(tmp_path / "table.mcap", 5))
    assert (len(recording), recording.fps) == (5, 25.0)
    assert recording.labels == {1: "object 1", 2: "object 2"}
    assert recording.image(3).mean() == pytest.approx(30, abs=2)
    assert sorted(recording.truth(4)) == [1, 2]
    assert np.argwhere(recording.truth(4)[1])[0].tolist() == [5, 9]


def test_what_is_out_of_view_is_not_in_the_truth(tmp_path: Path) -> None:
    recording = LabelledClip.load(write_recording(tmp_path / "table.mcap", 5))
    assert sorted(recording.truth(3)) == [1]
    assert recording.areas(2).tolist() == [0, 300, 300, 0, 300]


def test_an_index_past_the_end_is_that_of_the_next_round(tmp_path: Path) -> None:
    recording = LabelledClip.load(write_recording(tmp_path / "table.mcap", 5))
    assert np.array_equal(recording.image(12), recording.image(2))
    assert np.array_equal(recording.truth(12)[1], recording.truth(2)[1])
    assert recording.image(12).shape == (*SIZE, 3)


def test_frames_without_truth_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.mcap"
    with RecordingWriter(path) as writer:
        for seq in range(3):
            writer.write_frame(frame_at(seq), seq)
        writer.write_truth(make_truth(frame_at(1)))
    with refuses(BagError, field=("2", "3", "1", "truth")):
        LabelledClip.load(path)


def test_the_bundled_recording_has_what_the_demonstration_needs() -> None:
    recording = LabelledClip.load(TABLETOP)
    assert TABLETOP.stat().st_size < 10e6
    assert 10 <= len(recording) / recording.fps <= 20
    assert {(frame.width, frame.height, frame.encoding) for frame in recording.frames} == {(640, 480, "jpeg")}
    assert all(frame.depth is not None and frame.intrinsics is not None for frame in recording.frames)
    assert len(list(RecordingReader([TABLETOP]).poses())) == len(recording)
    assert len(set(recording.labels.values())) == len(recording.labels) >= 4
    assert (
        sorted(recording.truth(0)) == sorted(recording.truth(len(recording) - 1)) == sorted(recording.labels)
    )
    hidden = [int((recording.areas(label) == 0).sum()) for label in recording.labels]
    assert sum(count >= 10 for count in hidden) >= 2  # one is occluded, another leaves; both come back

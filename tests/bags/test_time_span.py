"""Parts of recordings by time: the same frames as in the whole recording, without reading what comes before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.bags.bag import open_bag
from sam3_node.bags.formats import mcap, video
from sam3_node.bags.pairing import TimeSpan, parse_time
from sam3_node.errors import BagError
from sam3_node.types import NANOSECONDS, Frame
from tests.support import mcap_files
from tests.support.recordings import frame_at, write_film
from tests.support.refuses import refuses
from tests.support.wire_examples import plain

SECOND = NANOSECONDS
EPOCH_NS = 1_700_000_000 * SECOND
PERIOD_NS = SECOND // 20
FRAMES = 100
WHOLE = TimeSpan()
SPANS = [
    TimeSpan(2 * SECOND),
    TimeSpan(None, 2 * SECOND),
    TimeSpan(SECOND + 1, 3 * SECOND),
    TimeSpan(10**6 * SECOND),
]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording in which a 150 KB frame comes every 50 ms: a chunk holds seven."""
    path = tmp_path_factory.mktemp("native") / "r.mcap"
    with RecordingWriter(path) as writer:
        for seq in range(FRAMES):
            frame = dataclasses.replace(frame_at(seq), encoding="jpeg", colour=bytes(150_000), depth=None)
            writer.write_frame(frame, EPOCH_NS + seq * PERIOD_NS)
    return path


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = np.zeros((FRAMES, 48, 64, 3), np.uint8)
    for seq, image in enumerate(images):
        image[:] = 2 * seq
        image[:, : seq % 64] = 255
    return write_film(tmp_path_factory.mktemp("film") / "film.mp4", images, 20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for camera in ("left", "right"):
        (folder / camera).mkdir()
        for seq in range(FRAMES):
            cv2.imwrite(str(folder / camera / f"{seq:05}.jpg"), np.full((8, 8, 3), seq, np.uint8))
    return folder


def read(path: Path, span: TimeSpan = WHOLE) -> list[Frame]:
    with open_bag(path, span=span) as bag:
        return list(bag)


def expect(frames: list[Frame], span: TimeSpan, kind: str) -> list[Frame]:
    begin, end = span.begin_ns or 0, span.end_ns or 10**18
    times = [frame.capture_ns if kind == "folder" else frame.seq * PERIOD_NS for frame in frames]
    return [frame for frame, time_ns in zip(frames, times, strict=True) if begin <= time_ns < end]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("kind", ["native", "film", "folder"])
def test_a_part_has_the_frames_of_the_whole(
    kind: str, span: TimeSpan, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    whole = read(path)
    expected = expect(whole, span, kind)
    found = read(path, span)
    assert [frame.key for frame in found] == [frame.key for frame in expected]
    assert [bytes(frame.colour) for frame in found] == [bytes(frame.colour) for frame in expected]


def test_chunks_outside_are_not_read(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Watched(mcap._McapFile):
        def read(self, length: int) -> bytes:
            lengths.append(length)
            return super().read(length)

    monkeypatch.setattr(mcap, "_McapFile", Watched)
    whole = len(read(native)), sum(lengths)
    lengths.clear()
    assert len(read(native, TimeSpan(2 * SECOND, 3 * SECOND))) == 20
    assert whole[0] == FRAMES
    assert sum(lengths) < whole[1] / 2


def test_a_recording_without_a_summary_has_the_same_part(native: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(native.read_bytes()[:-200_000])
    assert [frame.seq for frame in read(cut, TimeSpan(2 * SECOND, 3 * SECOND))] == list(range(40, 60))


def test_frames_of_a_film_before_the_part_are_not_decoded(
    film: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = video.Playback._whole_frames

    def watch(playback: video.Playback, *source: object) -> Iterator[object]:
        for image in decode(playback, *source):
            decoded.append(1)
            yield image

    monkeypatch.setattr(video.Playback, "_whole_frames", watch)
    assert [frame.seq for frame in read(film, TimeSpan(4 * SECOND, 4 * SECOND + SECOND // 2))] == list(
        range(80, 90)
    )
    assert len(decoded) < 40


def test_a_date_is_one_of_the_recording(native: Path, film: Path) -> None:
    found = read(native, TimeSpan(parse_time("2023-11-14T22:13:21Z"), EPOCH_NS + 2 * SECOND))
    assert [frame.seq for frame in found] == list(range(20, 40))
    with refuses(BagError, field=("recording", "date")):
        read(film, TimeSpan(EPOCH_NS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.5", 12_500_000_000),
        ("0", 0),
        (str(EPOCH_NS), EPOCH_NS),
        ("2023-11-14T23:13:20.250001+01:00", EPOCH_NS + 250_001_000),
    ],
)
def test_times_are_seconds_dates_or_nanoseconds(text: str, expected: int) -> None:
    assert parse_time(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "soon", "2023-11-14T22:13:20", "1e300"])
def test_other_times_are_refused(text: str) -> None:
    with refuses(ValueError, field=("seconds", "start")):
        parse_time(text)


def test_depth_and_intrinsics_of_a_part_are_those_of_the_whole(tmp_path: Path) -> None:
    path = mcap_files.write_ros2(tmp_path / "r.mcap", mcap_files.rgbd(30))
    whole = read(path)
    period_ns = mcap_files.PERIOD_NS
    found = read(path, TimeSpan(10 * period_ns, 20 * period_ns))
    assert [frame.seq for frame in found] == list(range(10, 20))
    assert [plain(frame) for frame in found] == [plain(frame) for frame in whole[10:20]]

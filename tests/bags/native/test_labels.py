"""Truth and poses beside frames, the bundled clip's content, and the earlier layout with frames in one message."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from sam3_node.errors import BagError, WireError

pytest.importorskip("mcap")

from mcap.reader import make_reader

from sam3_node.bags import RecordingReader, RecordingWriter, open_bag
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.types import Frame
from sam3_node.wire import decode_depth, decode_image
from tests.support.recordings import (
    frame_at,
    make_pose,
    make_truth,
    pack_frame_message,
    read_with_flipped_bytes,
    write_messages,
    write_recording,
)
from tests.support.wire_examples import jpeg_frame, plain, raw_frame

LARGE = 60_000

FRAMES = ["d3e7dea781b2aa4c", "2ce53ac33156f746", "362108418c86128c"]
TRUTH, POSES = "6ea48a19bfdd8c7b", "532b8aed1322a6e0"


def large_frame(seq: int) -> Frame:
    return replace(frame_at(seq), encoding="bgr8", width=200, height=100, colour=bytes(LARGE))


def hash_frame(frame: Frame) -> str:
    """Hash the decoded pixels and the header of a frame."""
    assert frame.depth is not None
    header = (
        frame.seq,
        frame.capture_ns,
        frame.clock,
        frame.intrinsics,
        frame.depth.scale_m,
        frame.depth.aligned,
    )
    parts = (repr(header).encode(), bytes(frame.colour), decode_depth(frame.depth).tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_the_bundled_clip_keeps_its_content() -> None:
    reader = RecordingReader([TABLETOP])
    frames, truth, poses = list(reader.frames()), list(reader.truth()), list(reader.poses())
    assert [len(frames), len(truth), len(poses)] == [225, 225, 225]
    assert [hash_frame(frames[seq]) for seq in (0, 100, 224)] == FRAMES
    masks = b"".join(item.mask.full().tobytes() for seq in (0, 100, 224) for item in truth[seq].instances)
    assert hashlib.sha256(masks).hexdigest()[:16] == TRUTH
    matrices = b"".join(pose.camera_to_world.tobytes() for pose in poses)
    assert hashlib.sha256(matrices).hexdigest()[:16] == POSES
    assert decode_image(frames[224]).shape == (480, 640, 3)


def test_truth_and_poses_come_back_beside_their_frames(tmp_path: Path) -> None:
    reader = RecordingReader([write_recording(tmp_path / "table.mcap", 4)])
    expected = [frame_at(seq) for seq in range(4)]
    assert [plain(truth) for truth in reader.truth()] == [plain(make_truth(frame)) for frame in expected]
    assert [plain(pose) for pose in reader.poses()] == [plain(make_pose(frame)) for frame in expected]
    assert [frame.seq for frame in reader.frames()] == [0, 1, 2, 3]
    assert not list(reader.masks())
    assert reader.lost is None


def test_a_recording_may_have_no_truth_and_no_poses(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "table.mcap") as writer:
        writer.write_frame(frame_at(0), 5)
    reader = RecordingReader([writer.path])
    assert not [*reader.truth(), *reader.poses()]


def test_any_mcap_reader_sees_topics_times_and_maps(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", [frame_at(7)])
    with path.open("rb") as file:
        rows = list(make_reader(file).iter_messages(log_time_order=False))
    frame = frame_at(7)
    topics = [f"/table/{name}" for name in ("calibration", "image", "depth", "header")]
    assert [channel.topic for _, channel, _ in rows] == [*topics, "truth/table", "pose/table"]
    assert {channel.message_encoding for _, channel, _ in rows[3:]} == {"msgpack"}
    assert {(message.log_time, message.sequence) for _, _, message in rows} == {(frame.capture_ns, 7)}
    header, _, pose = (msgpack.unpackb(message.data) for _, _, message in rows[3:])
    assert header["seq"] == 7
    assert pose["camera_to_world"] == [1, 0, 0, 0.7, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_a_truncated_file_gives_what_is_whole_then_says_so(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", [large_frame(seq) for seq in range(60)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    reader = RecordingReader([path])
    seqs = [frame.seq for frame in reader.frames()]
    assert seqs == list(range(len(seqs)))
    assert len(seqs) > 60 * 2 // 3 - (1 << 20) // LARGE - 2  # at most the chunk that was cut is lost
    assert "table.mcap is cut off" in str(reader.lost)


def test_a_byte_changed_in_the_pixels_is_damage(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 3)
    data = bytearray(path.read_bytes())
    data[data.index(frame_at(1).colour) + 100] ^= 1
    path.write_bytes(data)
    reader = RecordingReader([path])
    assert not list(reader.frames())
    assert "crc validation failed" in str(reader.lost)


def test_an_existing_file_is_overwritten_only_on_request(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 9)
    with RecordingWriter(path, overwrite=True) as writer:
        writer.write_frame(frame_at(3), 5)
    reader = RecordingReader([path])
    assert [frame.seq for frame in reader.frames()] == [3]
    assert reader.lost is None


@pytest.mark.parametrize("matrix", [[1.0] * 15, "eye", [float("nan")] * 16])
def test_poses_that_are_malformed_are_passed_over(tmp_path: Path, matrix: object) -> None:
    body = msgpack.packb({"v": 1, "camera": "table", "seq": 0, "camera_to_world": matrix})
    with RecordingWriter(tmp_path / "bad.mcap") as writer:
        writer._add("pose/table", body, 0, 0, 0)
    reader = RecordingReader([writer.path])
    assert not list(reader.poses())
    assert "pose/table: skipped malformed messages" in str(reader.lost)


def test_a_frame_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "table.mcap") as writer, pytest.raises(WireError):
        writer.write_frame(replace(large_frame(0), width=201), 5)


def read_all(path: Path) -> None:
    reader = RecordingReader([path])
    for items in (reader.frames(), reader.truth(), reader.poses(), reader.masks()):
        list(items)


def test_flipped_bytes_never_raise_anything_but_errors_of_this_package(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 1)
    read_with_flipped_bytes(path, read_all)


@pytest.mark.parametrize("frame", [raw_frame(), jpeg_frame(), frame_at(3)])
def test_frames_of_the_earlier_layout_come_back_as_they_were_written(tmp_path: Path, frame: Frame) -> None:
    path = write_messages(tmp_path / "old.mcap", (f"frame/{frame.camera}", pack_frame_message(frame)))
    with open_bag(path, [f"frame/{frame.camera}"]) as bag:
        (read,) = bag
    assert plain(read) == plain(frame)
    assert (bag.cameras, bag.lost) == ((frame.camera,), None)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        msgpack.packb({"colour": b"x"}),
        msgpack.packb({"header": {"v": 2}, "colour": b"x"}),
        msgpack.packb({"header": {}}),
    ],
)
def test_messages_that_are_no_frames_are_passed_over(tmp_path: Path, body: bytes) -> None:
    path = write_messages(
        tmp_path / "bad.mcap", ("frame/table", body), ("frame/table", pack_frame_message(frame_at(1)))
    )
    reader = RecordingReader([path])
    assert [frame.seq for frame in reader.frames()] == [1]
    assert "frame/table: skipped malformed messages" in str(reader.lost)


@pytest.mark.parametrize("topics", [["masks/wrist-1"], ["/cam/other"], []])
def test_a_file_without_frames_says_what_is_in_it(tmp_path: Path, topics: list[str]) -> None:
    path = write_messages(tmp_path / "none.mcap", *((topic, b"x") for topic in topics))
    expected: Any = f"found {topics[0]}" if topics else "found no message at all"
    with pytest.raises(BagError, match=expected):
        open_bag(path)

"""Frames, truth and poses written to MCAP and read back, whole and broken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from sam3_node.errors import BagError, Sam3NodeError, WireError

pytest.importorskip("mcap")

from mcap.reader import make_reader

from sam3_node.bags import FrameWriter, MaskBagWriter, read_frames, read_poses, read_truth
from sam3_node.bags.native.container import MessageWriter
from tests.support.recordings import frame_at, pose_of, truth_of, write_recording
from tests.support.wire_examples import jpeg_frame, masks, plain, raw_frame

LARGE = 60_000


def large_frame(seq: int):  # type: ignore[no-untyped-def]
    return replace(frame_at(seq), encoding="bgr8", width=200, height=100, colour=bytes(LARGE))


@pytest.mark.parametrize("frame", [raw_frame(), jpeg_frame(), frame_at(3)])
def test_frames_come_back_as_they_were_written(tmp_path: Path, frame) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "new" / "table.mcap"
    with FrameWriter(path) as writer:
        writer.write(frame)
    (found,) = read_frames(path)
    assert plain(found) == plain(frame)


def test_truth_and_poses_come_back_beside_their_frames(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 4)
    expected = [frame_at(seq) for seq in range(4)]
    assert [plain(truth) for truth in read_truth(path)] == [plain(truth_of(frame)) for frame in expected]
    assert [plain(pose) for pose in read_poses(path)] == [plain(pose_of(frame)) for frame in expected]
    assert [frame.seq for frame in read_frames(path)] == [0, 1, 2, 3]


def test_a_recording_may_have_no_truth_and_no_poses(tmp_path: Path) -> None:
    with FrameWriter(tmp_path / "table.mcap") as writer:
        writer.write(frame_at(0))
    assert not [*read_truth(tmp_path / "table.mcap"), *read_poses(tmp_path / "table.mcap")]


def test_any_mcap_reader_sees_topics_times_and_maps(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", [frame_at(7)])
    with path.open("rb") as file:
        rows = list(make_reader(file).iter_messages(log_time_order=False))
    frame = frame_at(7)
    topics = ["frame/table", "truth/table", "pose/table"]
    assert [(channel.topic, channel.message_encoding) for _, channel, _ in rows] == [
        (topic, "msgpack") for topic in topics
    ]
    assert {(message.log_time, message.sequence) for _, _, message in rows} == {(frame.capture_ns, 7)}
    body, _, pose = (msgpack.unpackb(message.data) for _, _, message in rows)
    assert (set(body), body["header"]["seq"], body["colour"]) == (
        {"header", "colour", "depth"},
        7,
        frame.colour,
    )
    assert pose["camera_to_world"] == [1, 0, 0, 0.7, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_a_truncated_file_gives_what_is_whole_then_says_so(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", [large_frame(seq) for seq in range(60)])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    seqs: list[int] = []
    with pytest.raises(BagError, match=r"table\.mcap is damaged, or its recorder was killed"):
        seqs.extend(frame.seq for frame in read_frames(path))
    assert seqs == list(range(len(seqs)))
    assert len(seqs) > 60 * 2 // 3 - (1 << 20) // LARGE - 2  # at most the chunk that was cut is lost


def test_a_byte_changed_in_the_pixels_is_damage(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 3)
    data = bytearray(path.read_bytes())
    data[data.index(frame_at(1).colour) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(BagError, match="CRCValidationError"):
        list(read_frames(path))


def test_a_file_without_frames_says_what_is_in_it(tmp_path: Path) -> None:
    with MaskBagWriter(tmp_path / "masks.mcap") as writer:
        writer.write(masks())
    with pytest.raises(BagError, match=r"expected messages on frame/<camera>, found only masks/wrist-1"):
        list(read_frames(tmp_path / "masks.mcap"))
    with FrameWriter(tmp_path / "none.mcap"):
        pass
    with pytest.raises(BagError, match="found no message at all"):
        list(read_frames(tmp_path / "none.mcap"))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"\xc1", "expected msgpack"),
        (msgpack.packb({"colour": b"x"}), "expected a map, found nothing"),
        (msgpack.packb({"header": {"v": 2}, "colour": b"x"}), "expected wire version 1"),
        (msgpack.packb({"header": {}}), "expected 'colour' to be binary data"),
    ],
)
def test_messages_that_are_no_frames_are_named(tmp_path: Path, body: bytes, what: str) -> None:
    with MessageWriter(tmp_path / "bad.mcap") as writer:
        writer.add("frame/table", body, 0, 0, 0)
    with pytest.raises(BagError, match=rf"bad\.mcap, topic frame/table: frame: {what}"):
        list(read_frames(tmp_path / "bad.mcap"))


@pytest.mark.parametrize("matrix", [[1.0] * 15, "eye", [float("nan")] * 16])
def test_poses_that_are_none_are_named(tmp_path: Path, matrix: object) -> None:
    body = msgpack.packb({"v": 1, "camera": "table", "seq": 0, "camera_to_world": matrix})
    with MessageWriter(tmp_path / "bad.mcap") as writer:
        writer.add("pose/table", body, 0, 0, 0)
    with pytest.raises(BagError, match=r"topic pose/table: pose: expected 'camera_to_world'"):
        list(read_poses(tmp_path / "bad.mcap"))


def test_a_frame_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    with FrameWriter(tmp_path / "table.mcap") as writer, pytest.raises(WireError):
        writer.write(replace(large_frame(0), width=201))


def test_flipped_bytes_never_raise_anything_but_errors_of_ours(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 1)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        broken[int(random.integers(len(broken)))] = int(random.integers(256))
        path.write_bytes(broken)
        for read in (read_frames, read_truth, read_poses):
            try:
                list(read(path))
            except Sam3NodeError:
                continue

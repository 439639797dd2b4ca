"""Masks, truth and poses beside frames, and the bundled clip."""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from mcap.reader import make_reader

from sam3_node.bags import LabelledClip, RecordingReader, RecordingWriter, open_bag, read_masks
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.errors import BagError, Sam3NodeError, WireError
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import decode_depth, decode_image, pack_masks
from tests.support.mcap_files import T0, Moment, write_mcap
from tests.support.recordings import SIZE, frame_at, make_pose, make_truth, write_recording
from tests.support.refuses import mentions, refuses
from tests.support.wire_examples import plain

LARGE = 60_000

FRAMES = ["d3e7dea781b2aa4c", "2ce53ac33156f746", "362108418c86128c"]
TRUTH = "6ea48a19bfdd8c7b"
POSES = "532b8aed1322a6e0"


def large_frame(seq: int) -> Frame:
    return replace(frame_at(seq), encoding="bgr8", width=200, height=100, colour=bytes(LARGE))


def hash_frame(frame: Frame) -> str:
    """Hash the decoded pixels and the header of a frame."""
    depth = frame.depth
    header = (frame.seq, frame.capture_ns, frame.clock, frame.intrinsics, depth.scale_m, depth.aligned)
    parts = (repr(header).encode(), bytes(frame.colour), decode_depth(depth).tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_the_bundled_clip_keeps_its_content() -> None:
    reader = RecordingReader([TABLETOP])
    frames = list(reader.frames())
    truth = list(reader.truth())
    poses = list(reader.poses())
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
    assert mentions(str(reader.lost), "table.mcap", "cut off")


def test_a_byte_changed_in_the_pixels_is_damage(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "table.mcap", 3)
    data = bytearray(path.read_bytes())
    data[data.index(frame_at(1).colour) + 100] ^= 1
    path.write_bytes(data)
    reader = RecordingReader([path])
    assert not list(reader.frames())
    assert mentions(str(reader.lost), "crc")


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
    assert mentions(str(reader.lost), "pose/table")


def test_a_frame_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "table.mcap") as writer, pytest.raises(WireError):
        writer.write_frame(replace(large_frame(0), width=201), 5)


def read_all(path: Path) -> None:
    reader = RecordingReader([path])
    for items in (reader.frames(), reader.truth(), reader.poses(), reader.masks()):
        list(items)


@pytest.mark.parametrize("kind", ["frames", "masks"])
def test_flipped_bytes_never_raise_anything_but_errors_of_this_package(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "r.mcap"
    write_recording(path, 1) if kind == "frames" else write(path, [masks_at(1)])
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        broken[int(random.integers(len(broken)))] = int(random.integers(256))
        path.write_bytes(broken)
        with contextlib.suppress(Sam3NodeError):
            read_all(path) if kind == "frames" else list(read_masks(path))


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
    with RecordingWriter(tmp_path / "bad.mcap") as writer:
        writer._add("/table/header", body, 0, 0, 0)
        writer.write_frame(frame_at(1), 1)
    reader = RecordingReader([tmp_path / "bad.mcap"])
    assert [frame.seq for frame in reader.frames()] == [1]
    assert mentions(str(reader.lost), "/table/header")


@pytest.mark.parametrize("topics", [["masks/wrist-1"], ["/cam/other"], []])
def test_a_file_without_frames_says_what_is_in_it(tmp_path: Path, topics: list[str]) -> None:
    moments = [Moment(topic, "raw", T0) for topic in topics]
    path = write_mcap(tmp_path / "none.mcap", moments, "msgpack", "", lambda _: ("", b"", b"x"))
    expected: Any = f"found {topics[0]}" if topics else "found no message at all"
    with pytest.raises(BagError, match=expected):
        open_bag(path)


def write(path: Path, frames: list[MaskFrame], encoding: Any = "rle") -> Path:
    """Write masks as the demonstration and a replay do."""
    with RecordingWriter(path, overwrite=True) as bag:
        for masks in frames:
            bag.write_masks(pack_masks(masks, encoding)[1], masks, masks.age_origin_ns)
    return path


def masks_at(seq: int, camera: str = "cam0") -> MaskFrame:
    full = np.random.default_rng(seq).random((48, 64)) > 0.5
    instance = Instance(3, "red mug", 0.75, "tracked", seq, 0, Mask.from_full(full))
    return MaskFrame(
        camera, seq, 1_000 + seq, 64, 48, 1_100 + seq, 1_200 + seq, 0, "nano", {"track": 5}, (), (instance,)
    )


def told(masks: MaskFrame) -> tuple[object, ...]:
    return masks.camera, masks.seq, masks.capture_ns, masks.published_ns, masks.stages_us


def assert_same(found: MaskFrame, expected: MaskFrame) -> None:
    assert told(found) == told(expected)
    assert np.array_equal(found.instances[0].mask.full(), expected.instances[0].mask.full())


@pytest.mark.parametrize("encoding", ["rle", "bits+zstd"])
def test_masks_come_back_as_they_were_written(tmp_path: Path, encoding: str) -> None:
    written = [masks_at(0), masks_at(1, "left"), masks_at(2)]
    read = list(read_masks(write(tmp_path / "new" / "masks.mcap", written, encoding)))
    assert len(read) == 3
    for found, expected in zip(read, written, strict=True):
        assert_same(found, expected)


def test_any_mcap_reader_sees_masks(tmp_path: Path) -> None:
    path = write(tmp_path / "masks.mcap", [masks_at(7)])
    with path.open("rb") as file:
        ((_, channel, message),) = make_reader(file).iter_messages(topics=["masks/cam0"])
    assert (channel.topic, channel.message_encoding) == ("masks/cam0", "msgpack")
    assert (message.log_time, message.publish_time, message.sequence) == (1_007, 1_207, 7)


def test_a_truncated_file_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "masks.mcap"
    write(path, [masks_at(seq) for seq in range(600)], "bits+zstd")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    seqs: list[int] = []
    with refuses(BagError, field="masks.mcap"):
        seqs.extend(masks.seq for masks in read_masks(path))
    assert seqs == list(range(len(seqs)))
    assert len(seqs) > 200


@pytest.mark.parametrize(
    ("content", "found"), [(b"certainly not an MCAP file", ("begins", "otherwise")), (b"", "empty")]
)
def test_a_file_that_is_no_mcap_is_refused(
    tmp_path: Path, content: bytes, found: str | tuple[str, ...]
) -> None:
    path = tmp_path / "masks.mcap"
    path.write_bytes(content)
    with refuses(BagError, field=found):
        list(read_masks(path))
    with pytest.raises(BagError, match=r"cannot read .*none\.mcap"):
        list(read_masks(tmp_path / "none.mcap"))


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

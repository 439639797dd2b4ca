"""open_bag recognises formats by content, gives all cameras in order, survives damage; bag:FILE plays the result."""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from rosbags.rosbag1 import Writer as Ros1Writer
from rosbags.rosbag2 import Writer as Ros2FolderWriter

from sam3_node.bags import open_bag
from sam3_node.bags.bag import sample_images
from sam3_node.bags.discovery import MAX_FAILURES, probe
from sam3_node.bags.formats.mcap import McapBag
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.cameras.sources import open_camera
from sam3_node.errors import BagError
from sam3_node.settings import CameraSettings
from sam3_node.types import Frame
from sam3_node.wire import decode_depth, decode_image, encode_depth, pack_masks
from tests.support import ros_recordings
from tests.support.hostile_recordings import execute
from tests.support.mcap_files import (
    COLOUR,
    DEPTH,
    PERIOD_NS,
    ROS1,
    ROS2,
    T0,
    WRITERS,
    Moment,
    colour_pixels,
    depth_pixels,
    jpeg,
    rgbd,
    ros_message,
    uncompressed,
    write_json,
    write_mcap,
    write_protobuf,
    write_ros2,
)
from tests.support.recordings import frame_at, read_bag, write_film, write_recording
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tests.support.wire_examples import masks

FAST = CameraSettings(fps=1000)


def record(path: Path, frames: Sequence[Frame]) -> Path:
    """Write as `sam3-node record` does."""
    with RecordingWriter(path) as writer:
        for frame in frames:
            writer.write_frame(frame, frame.capture_ns)
            writer.flush()
    return path


def write_masks(path: Path) -> None:
    with RecordingWriter(path) as writer:
        writer.write_masks(pack_masks(masks())[1], masks(), 5)


def write_rosbags(writer: Ros1Writer | Ros2FolderWriter, store: Any) -> Path:
    """Write by the library rosbags, for ROS 1 or 2."""
    messages = ((item.topic, item.logged_ns, ros_message(item, store)) for item in rgbd(4))
    return ros_recordings.write_by_rosbags(writer, store, messages)


def write_ros2_folder_without_metadata(path: Path) -> Path:
    path.mkdir()
    moments = list(rgbd(4))
    write_ros2(path / "run_10.mcap", moments[6:])
    write_ros2(path / "run_9.mcap", moments[:6])
    return path


KINDS = {
    **WRITERS,
    "ROS 1 bag": lambda path, _: write_rosbags(Ros1Writer(path), ROS1),
    "ROS 2 folder": lambda path, _: write_rosbags(Ros2FolderWriter(path, version=9), ROS2),
    "ROS 2 folder, never closed": lambda path, _: write_ros2_folder_without_metadata(path),
}


@each_row("kind", sorted(KINDS))
def test_every_format_gives_the_same_frames_whatever_the_file_is_called(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path / "recording.bin", rgbd(4))
    with open_bag(path) as bag:
        assert bag.cameras == ("camera",)
        for _ in range(2):
            frames = list(bag)
            assert [(frame.camera, frame.seq, frame.capture_ns, frame.clock) for frame in frames] == [
                ("camera", index, T0 + index * PERIOD_NS, "system") for index in range(4)
            ]
    for index, frame in enumerate(frames):
        assert np.array_equal(decode_image(frame), colour_pixels(index))
        assert frame.depth.aligned
        assert np.array_equal(decode_depth(frame.depth), depth_pixels(index))
        assert (frame.intrinsics.fx, frame.intrinsics.model) == (60.0, "brown_conrady")


def test_the_bundled_recording_is_a_bag() -> None:
    with open_bag(TABLETOP) as bag:
        assert [frame.seq for frame in bag] == list(range(225))
        assert (bag.cameras, bag.lost) == (("tabletop",), None)


def test_our_own_recordings_come_back_as_they_were(tmp_path: Path) -> None:
    expected = [frame_at(0), frame_at(0, "left"), frame_at(1), frame_at(1, "left")]
    path = tmp_path / "recorded.mcap"
    record(path, expected)
    assert open_bag(path).cameras == ("table", "left")
    frames, lost = read_bag(path)
    assert [(frame.camera, frame.seq, frame.colour, frame.times) for frame in frames] == [
        (frame.camera, frame.seq, frame.colour, frame.times) for frame in expected
    ]
    assert lost is None
    for wanted in ("left", "/left/image"):
        assert {frame.camera for frame in read_bag(path, [wanted])[0]} == {"left"}
    with refuses(BagError, field=("table", "left")):
        open_bag(path, ["right"])


@pytest.mark.parametrize("write", [write_recording, record])
def test_splits_of_a_recording_are_one_bag(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    for split, name in ((0, "run"), (2, "run_0001"), (10, "run_0002")):
        write(tmp_path / f"{name}.mcap", [frame_at(seq) for seq in range(3 * split, 3 * split + 3)])
    write_masks(tmp_path / "masks.mcap")
    (tmp_path / "run_0003.mcap").write_bytes(b"")
    frames, lost = read_bag(tmp_path)
    assert [frame.seq for frame in frames] == [0, 1, 2, 6, 7, 8, 30, 31, 32]
    assert lost is None


@pytest.mark.parametrize("write", [write_recording, record])
def test_a_damaged_split_costs_only_its_own_end(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    large = cv2.imencode(".png", np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8))[
        1
    ].tobytes()

    def frame(seq: int) -> Frame:
        return replace(frame_at(seq), encoding="png", width=640, height=480, colour=large)

    write(tmp_path / "run.mcap", [frame(seq) for seq in range(6)])
    write(tmp_path / "run_0001.mcap", [frame(seq) for seq in range(6, 9)])
    first = tmp_path / "run.mcap"
    first.write_bytes(first.read_bytes()[: 7 << 19])
    frames, lost = read_bag(tmp_path)
    seqs = [frame.seq for frame in frames]
    assert seqs[:2] == [0, 1]
    assert seqs[-3:] == [6, 7, 8]
    assert len(seqs) < 9
    assert "run.mcap" in str(lost)
    assert "run_0001.mcap" not in str(lost)


@pytest.mark.parametrize("write", [write_recording, record, *WRITERS.values()])
def test_a_recording_cut_anywhere_never_raises_once_it_is_open(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "cut.mcap"
    own = write in (write_recording, record)
    write(path, [frame_at(seq) for seq in range(6)] if own else rgbd(6))
    data = path.read_bytes()
    opened = 0
    for length in np.random.default_rng(2).integers(0, len(data), 25):
        path.write_bytes(data[:length])
        try:
            bag = open_bag(path)
        except BagError:
            continue
        opened += 1
        assert [frame.seq for frame in bag] == list(range(len(list(bag))))
    assert opened


def test_several_cameras_come_in_order_and_topics_narrow_them(tmp_path: Path) -> None:
    moments = [
        Moment(f"/{name}/image", "compressed", T0 + index * PERIOD_NS + at, jpeg(index), "jpeg")
        for index in range(3)
        for at, name in enumerate(("front", "wrist"))
    ]
    path = write_protobuf(tmp_path / "two.mcap", moments)
    frames, _ = read_bag(path)
    assert [(frame.camera, frame.seq) for frame in frames] == [
        (name, index) for index in range(3) for name in ("front", "wrist")
    ]
    for wanted in ("wrist", "/wrist/image"):
        assert [frame.camera for frame in read_bag(path, [wanted])[0]] == ["wrist"] * 3
    with refuses(BagError, field=("/front/image", "/wrist/image")):
        open_bag(path, ["wrist", "back"])


@pytest.mark.parametrize(("write", "encoding"), [(write_json, "hsv8"), (write_ros2, "nv24")])
def test_a_camera_that_cannot_be_read_is_left_out_unless_it_is_chosen(
    tmp_path: Path, write: Any, encoding: str
) -> None:
    odd = [replace(m, topic="/thermal/image", encoding=encoding) for m in rgbd(5) if m.topic == COLOUR]
    path = write(tmp_path / "odd.mcap", [*odd, *rgbd(5)])
    frames, lost = read_bag(path)
    assert [frame.camera for frame in frames] == ["camera"] * 5
    assert mentions(str(lost), "thermal", "/thermal/image")
    with refuses(BagError, field=("/thermal/image", encoding)):
        read_bag(path, ["thermal"])
    assert len(read_bag(path, ["camera"])[0]) == 5
    with refuses(BagError, field=encoding):
        open_bag(write(tmp_path / "alone.mcap", odd))


def test_what_is_no_recording_is_refused_with_the_formats(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, content, what in (
        ("absent.mcap", None, "found no file at"),
        ("empty.bag", b"", "found an empty one at"),
        ("garbage.mcap", bytes(range(256)) * 9, "found another file at"),
        ("text.db3", b"not a database", "found another file at"),
        ("folder", None, "found a folder without one at"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with refuses(BagError, field=(what, name)):
            open_bag(tmp_path / name)


def test_recordings_without_messages_or_cameras_are_refused(tmp_path: Path) -> None:
    with refuses(BagError, field="message"):
        open_bag(write_ros2(tmp_path / "bare.mcap", []))
    write_masks(tmp_path / "masks.mcap")
    with refuses(BagError, field="masks/wrist-1"):
        open_bag(tmp_path / "masks.mcap")
    with refuses(BagError, field=("/camera/color/camera_info", "sensor_msgs/msg/CameraInfo")):
        open_bag(write_ros2(tmp_path / "info.mcap", [Moment("/camera/color/camera_info", "info", T0)]))


def test_a_closed_bag_ends_its_iteration(tmp_path: Path) -> None:
    bag = open_bag(write_json(tmp_path / "rgbd.mcap", rgbd(5)))
    frames = iter(bag)
    next(frames)
    bag.close()
    bag.close()
    assert not list(frames)


def test_a_recording_that_is_gone_is_an_error(tmp_path: Path) -> None:
    for write in (write_recording, lambda path: write_json(path, rgbd(2))):
        bag = open_bag(write(tmp_path / "gone.mcap"))
        (tmp_path / "gone.mcap").unlink()
        with pytest.raises(BagError, match="cannot read"):
            list(bag)


@pytest.mark.parametrize("format_", sorted(WRITERS))
def test_any_recording_is_played_as_a_camera(tmp_path: Path, format_: str) -> None:
    path = WRITERS[format_](tmp_path / "rgbd.mcap", rgbd(3))
    captured = list(open_camera(f"bag:{path}", FAST))
    assert [item.times for item in captured] == [{"media_ns": index * PERIOD_NS} for index in range(3)]
    assert np.array_equal(captured[2].pixels(), colour_pixels(2))
    assert np.array_equal(decode_depth(captured[2].depth), depth_pixels(2))


def test_a_camera_of_a_recording_is_played_by_its_name(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "two.mcap", [frame_at(0), frame_at(5, "left"), frame_at(1)])
    for uri, camera, count in ((f"bag:{path}", "table", 2), (f"bag:{path}?camera=left", "left", 1)):
        assert [item.image.camera for item in open_camera(uri, FAST)] == [camera] * count  # type: ignore[union-attr]
    with refuses(BagError, field=("table", "left")):
        open_camera(f"bag:{path}?camera=right", FAST)
    odd = path.rename(tmp_path / "two?camera=one.mcap")
    assert len(list(open_camera(f"bag:{odd}", FAST))) == 2


def test_a_cut_recording_is_played_as_far_as_it_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_ros2(tmp_path / "cut.mcap", rgbd(12), **uncompressed(6000))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with caplog.at_level(logging.WARNING):
        captured = list(open_camera(f"bag:{path}", FAST))
    assert 0 < len(captured) < 12
    assert mentions(caplog.text, "cut.mcap", "cut off")


def test_folders_of_images_and_videos_are_bags(tmp_path: Path) -> None:
    folder = tmp_path / "JPEGImages" / "cup"
    folder.mkdir(parents=True)
    for index in range(3):
        (folder / f"{index:05}.jpg").write_bytes(jpeg(index))
    frames, lost = read_bag(tmp_path)
    assert [(frame.camera, frame.seq, frame.colour) for frame in frames] == [
        ("cup", index, jpeg(index)) for index in range(3)
    ]
    assert (frames[0].clock, lost) == ("device", None)
    video = write_film(tmp_path / "video.mp4", (np.full((48, 64, 3), 40 * n, np.uint8) for n in range(4)), 10)
    frames, _ = read_bag(video)
    assert [frame.capture_ns for frame in frames] == [index * 100_000_000 for index in range(4)]
    assert decode_image(frames[3]).mean() == pytest.approx(120, abs=4)


def grey(topic: str, index: int, **changes: Any) -> Moment:
    """Return 8 bits of depth to look at."""
    data = (depth_pixels(index) >> 4).astype(np.uint8)
    moment = Moment(topic, "raw", T0 + index * PERIOD_NS, data.tobytes(), "8UC1", step=data.shape[1])
    return replace(moment, **changes)


@each_row("format_", ["ros2", "ros1", "json", "protobuf"])
@each_row("kind", ["8UC1", "jpeg"])
def test_pictures_on_the_topic_of_depth_are_told(tmp_path: Path, format_: str, kind: str) -> None:
    moments = [moment for moment in rgbd(3) if "depth" not in moment.topic]
    topic = "/camera/depth/image_raw" + ("/compressed" if kind == "jpeg" else "")
    for index in range(3):
        picture = replace(grey(topic, index), kind="compressed", data=jpeg(index), encoding="jpeg")
        moments.append(picture if kind == "jpeg" else grey(topic, index))
    frames, lost = read_bag(WRITERS[format_](tmp_path / "bag.mcap", moments))
    assert [frame.depth for frame in frames] == [None] * 3
    assert topic in str(lost)
    assert "expected depth" in str(lost)


def test_depth_is_taken_from_the_topic_that_holds_it(tmp_path: Path) -> None:
    moments = [
        *(
            replace(moment, topic=moment.topic.replace("aligned_depth_to_color", "depth"))
            for moment in rgbd(3)
        ),
        *(grey("/camera/color/depth/image_raw", index) for index in range(3)),  # nearer to colour by its name
    ]
    frames, lost = read_bag(write_ros2(tmp_path / "bag.mcap", moments))
    assert all(frame.depth is not None for frame in frames)
    assert lost is None


@pytest.mark.parametrize("stated", [False, True])
def test_alignment_of_depth_can_be_stated(tmp_path: Path, stated: bool) -> None:
    moments = [
        replace(moment, topic=moment.topic.replace("aligned_depth_to_color", "depth")) for moment in rgbd(2)
    ]
    with open_bag(write_ros2(tmp_path / "bag.mcap", moments), depth_aligned=stated) as bag:
        assert [frame.depth is not None and frame.depth.aligned for frame in bag] == [stated] * 2
    unaligned = encode_depth(depth_pixels(0), "z16", 0.001, False)
    path = record(tmp_path / "own.mcap", [replace(frame_at(0), depth=unaligned)])
    with open_bag(path, depth_aligned=stated) as bag:
        assert [frame.depth is not None and frame.depth.aligned for frame in bag] == [stated]


@pytest.mark.verifies(
    "recording",
    "CameraInfo and CameraCalibration: K of raw images, P of rectified ones, other sizes",
    "other implementation",
    "messages of rosbags and of Foxglove's schemas",
)
@pytest.mark.parametrize("format_", ["ros2", "ros1", "json", "protobuf"])
@pytest.mark.parametrize(
    ("image", "expected"), [("image_raw", (60.0, 15.5)), ("image_rect_color", (50.0, 14.0))]
)
def test_rectified_images_have_the_intrinsics_of_p(
    tmp_path: Path, format_: str, image: str, expected: tuple[float, float]
) -> None:
    p = (50.0, 0.0, 14.0, -3.0, 0.0, 51.0, 11.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    moments = [
        replace(moment, topic=moment.topic.replace("image_raw", image), p=p if moment.kind == "info" else ())
        for moment in rgbd(2)
    ]
    frames, lost = read_bag(WRITERS[format_](tmp_path / "bag.mcap", moments))
    assert [frame.intrinsics and (frame.intrinsics.fx, frame.intrinsics.cx) for frame in frames] == [
        expected
    ] * 2
    assert [frame.intrinsics and frame.intrinsics.model for frame in frames] == [
        "none" if "rect" in image else "brown_conrady"
    ] * 2
    assert lost is None


@pytest.mark.parametrize("format_", ["ros2", "ros1", "json", "protobuf"])
def test_intrinsics_of_another_size_are_scaled_or_left_out_and_told(tmp_path: Path, format_: str) -> None:
    for width, expected in ((64, (30.0, 7.75)), (60, None)):
        moments = [
            replace(moment, width=width, height=48) if moment.kind == "info" else moment for moment in rgbd(2)
        ]
        frames, lost = read_bag(WRITERS[format_](tmp_path / f"{width}.mcap", moments))
        found = [frame.intrinsics and (frame.intrinsics.fx, frame.intrinsics.cx) for frame in frames]
        assert found == [expected] * 2
        assert (lost is None) == (expected is not None)
        assert lost is None or mentions(lost, "60 x 48")


def test_a_depth_of_an_unknown_encoding_is_left_out(tmp_path: Path) -> None:
    moments = [replace(m, encoding="rvl") if m.topic == DEPTH else m for m in rgbd(5)]
    with open_bag(write_ros2(tmp_path / "r.mcap", moments)) as bag:
        frames = list(bag)
        assert f"skipped {DEPTH}" in str(bag.lost)
        assert "'rvl'" in str(bag.lost)
    assert len(frames) == 5
    assert all(frame.depth is None and frame.intrinsics is not None for frame in frames)


def test_a_number_beyond_all_bounds_costs_one_message(tmp_path: Path) -> None:
    def encode(moment: Moment) -> tuple[str, bytes, bytes]:
        text = json.dumps(
            {"timestamp": {"sec": 1, "nsec": 0}, "width": 1, "height": 1}
            | {"encoding": "mono8", "step": 1, "data": "AA=="}
        )
        return "foxglove.RawImage", b"{}", text.replace('"sec": 1', '"sec": 1e400').encode()

    path = write_mcap(tmp_path / "r.mcap", list(rgbd(1))[:1], "json", "jsonschema", encode)
    reader = McapBag(path)
    assert list(reader.samples({COLOUR})) == []
    assert reader.lost is not None


def test_a_topic_without_a_name_is_passed_over(tmp_path: Path) -> None:
    (file,) = ros_recordings.write_ros2(tmp_path / "bag", 3).glob("*.db3")
    copy = tmp_path / "one.db3"
    shutil.copy(file, copy)
    nullable = "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'topics'"
    execute(copy, "PRAGMA writable_schema=ON", nullable)
    execute(copy, "INSERT INTO topics (id, serialization_format) SELECT max(id) + 1, 'cdr' FROM topics")
    with open_bag(copy) as bag:
        assert len(list(bag)) == 3


def count_passes(path: Path, moments: list[Moment]) -> tuple[dict[str, Any], int]:
    """Return the first messages of all topics, and how often the recording was read for them."""
    reader = McapBag(write_ros2(path, moments))
    passes = []
    read = reader.samples
    reader.samples = lambda topics: passes.append(len(topics)) or read(topics)  # type: ignore[method-assign]
    return probe(reader, [topic.name for topic in reader.topics]), len(passes)


def test_first_messages_are_found_in_few_passes(tmp_path: Path) -> None:
    """Topics that begin late, and some that cannot be read, cost a few passes and not one each."""
    good = next(iter(rgbd(1)))
    moments = [replace(good, topic=f"/c{number}/image", stamp_ns=T0 + number) for number in range(60)]
    moments += [replace(good, topic="/c0/image", stamp_ns=T0 + number) for number in range(100, 400)]
    moments += [replace(good, topic=f"/late{number}/image", stamp_ns=T0 + 1000) for number in range(3)]
    moments += [replace(good, topic=f"/odd{number}/image", encoding="hsv8") for number in range(2)]
    found, passes = count_passes(tmp_path / "r.mcap", moments)
    assert len(found) == 65
    refused = {name for name, first in found.items() if isinstance(first, BagError)}
    assert refused == {"/odd0/image", "/odd1/image"}
    assert passes <= 6


def test_hundreds_of_topics_that_cannot_be_read_are_refused_in_bounded_passes(tmp_path: Path) -> None:
    odd = [replace(next(iter(rgbd(1))), topic=f"/c{number}/image", encoding="hsv8") for number in range(100)]
    found, passes = count_passes(tmp_path / "r.mcap", odd)
    assert len(found) == 100
    assert all(isinstance(first, BagError) for first in found.values())
    assert passes == MAX_FAILURES


def test_a_folder_of_many_sequences_is_probed_one_image_each(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"s{number}").mkdir()
        for index in range(3):
            (tmp_path / f"s{number}" / f"{index}.jpg").write_bytes(jpeg(index))
    with open_bag(tmp_path) as bag:
        assert len(bag.cameras) == 40
        assert len(list(bag)) == 120
        assert bag.lost is None


@pytest.mark.parametrize(
    ("name", "word"), [(".zgroup", "Zarr"), ("zarr.json", "Zarr"), ("a.tfrecord-00000", "RLDS")]
)
def test_datasets_that_are_not_read_are_named(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with refuses(BagError, field=word):
        open_bag(tmp_path)


COUNT = 9


def numbered(index: int) -> np.ndarray:
    """Return a grey image whose brightness is its number."""
    return np.full((48, 64, 3), 20 * index, np.uint8)


def write_folder(root: Path) -> Path:
    for index in range(COUNT):
        cv2.imwrite(str(root / f"{index}.png"), numbered(index))
    (root / "notes.txt").write_text("not an image")
    return root


def write_frames(root: Path) -> Path:
    frames = [frame_at(2 * seq) for seq in range(COUNT)]  # brightness 20 apart
    other = [frame_at(99, camera="other")]
    return write_recording(root / "frames.mcap", other[:0] + frames + other)


def write_video(root: Path) -> Path:
    return write_film(root / "video.avi", map(numbered, range(COUNT)), 10, "MJPG")


def numbers(source: Path, count: int, step: int | None = None) -> list[int]:
    images = list(sample_images(source, count, step))
    assert all(image.shape == (48, 64, 3) and image.dtype == np.uint8 for image in images)
    return [round(float(image.mean()) / 20) for image in images]


@pytest.mark.parametrize("make", [write_folder, write_frames, write_video])
def test_images_are_spread_over_a_source(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = make(tmp_path)
    assert numbers(source, 3) == [0, 4, 8]
    assert numbers(source, 1) == [0]
    assert numbers(source, 100) == list(range(COUNT))
    assert numbers(source, 3, 2) == [0, 2, 4]
    assert numbers(source, 100, 4) == [0, 4, 8]


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "4.png").write_bytes(b"no image")
    assert numbers(folder, 3) == [0, 8]
    recording = write_frames(tmp_path)
    recording.write_bytes(recording.read_bytes()[:-200])
    assert numbers(recording, 2, 1) == [0, 1]


def test_images_of_a_folder_may_have_any_sizes(tmp_path: Path) -> None:
    for name, side in (("a.png", 10), ("b.bmp", 20), ("c.webp", 30)):
        cv2.imwrite(str(tmp_path / name), np.zeros((side, side, 3), np.uint8))
    assert [image.shape[0] for image in sample_images(tmp_path, 5)] == [10, 20, 30]


def test_a_source_without_images_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    wrong = tmp_path / "wrong"
    empty.mkdir()
    wrong.mkdir()
    (wrong / "a.png").write_bytes(b"no image")
    bag = tmp_path / "bag.mcap"
    video = tmp_path / "video.mp4"
    bag.write_bytes(b"nothing of the kind")
    video.write_bytes(b"nothing of the kind")
    for source in (bag, video, wrong, empty):
        with pytest.raises(BagError):
            list(sample_images(source, 3))
    with refuses(BagError, field="file"):
        list(sample_images(tmp_path / "absent", 3))

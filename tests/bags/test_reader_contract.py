"""The contract of all readers of recordings, whatever the format."""

import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from sam3_node.bags.bag import READERS, open_bag
from sam3_node.bags.formats.hdf5 import Hdf5Bag
from sam3_node.bags.formats.image_folders import ImagesBag
from sam3_node.bags.formats.lerobot import LeRobotBag
from sam3_node.bags.formats.mcap import McapBag
from sam3_node.bags.formats.realsense import RealSenseBag
from sam3_node.bags.formats.rosbag import RosBag
from sam3_node.bags.formats.video import VideoBag
from sam3_node.bags.samples import CameraInfo, Joints, Sample, SampleReader
from sam3_node.errors import BagError
from tests.support import ros_recordings as ros
from tests.support.damaged_recordings import write_images, write_tum
from tests.support.hdf5_files import make_pictures, write_aloha, write_robomimic
from tests.support.mcap_files import WRITERS, rgbd, uncompressed
from tests.support.paths import ROOT
from tests.support.realsense_bags import write_bag
from tests.support.recordings import write_film

Key = tuple[object, ...]


class Format(NamedTuple):
    """A reader, and a function that writes a recording for it."""

    reader: type[SampleReader]
    write: Callable[[Path], Path]


def write_mcap(kind: str, path: Path) -> Path:
    return WRITERS[kind](path, rgbd(12), **uncompressed(6000))


def write_video(suffix: str, codec: str, path: Path) -> Path:
    images = (np.random.default_rng(n).integers(0, 255, (48, 64, 3), np.uint8) for n in range(20))
    return write_film(path.with_suffix(suffix), images, codec=codec)


def copy_dataset(version: str, path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "tests/data/lerobot" / version, path))


FORMATS = {
    **{f"mcap {kind}": Format(McapBag, partial(write_mcap, kind)) for kind in WRITERS},
    "ros 1": Format(RosBag, partial(ros.write_ros1, frames=20)),
    "ros 1, lz4": Format(RosBag, partial(ros.write_ros1, frames=20, compression="LZ4")),
    "ros 2 folder": Format(RosBag, partial(ros.write_ros2, frames=20)),
    "ros 2 folder of mcap": Format(RosBag, partial(ros.write_ros2, frames=400, storage="MCAP")),
    "ros 2 database": Format(RosBag, lambda path: next(ros.write_ros2(path, 20).glob("*.db3"))),
    "realsense": Format(RealSenseBag, partial(write_bag, frames=6)),
    "video in avi": Format(VideoBag, partial(write_video, ".avi", "MJPG")),
    "video in mkv": Format(VideoBag, partial(write_video, ".mkv", "mp4v")),
    "lerobot 2.1": Format(LeRobotBag, partial(copy_dataset, "v2.1")),
    "lerobot 3.0": Format(LeRobotBag, partial(copy_dataset, "v3.0")),
    "hdf5": Format(Hdf5Bag, lambda path: write_aloha(path, {"a": make_pictures(20)}, compress=True, fps=25)),
    "hdf5 episodes": Format(
        Hdf5Bag, lambda path: write_robomimic(path, {0: make_pictures(3), 2: make_pictures(4, 2)})
    ),
    "images": Format(ImagesBag, partial(write_images, "png")),
    "images with stamps": Format(ImagesBag, write_tum),
}


def damage(path: Path, reader: type[SampleReader]) -> None:
    """Take something from the end of a recording: a third of a file, an image, a video."""
    if reader is LeRobotBag:
        max(path.rglob("*.mp4")).unlink()
    elif reader is ImagesBag:
        max(path.rglob("*.png")).write_bytes(b"no image")
    elif reader is Hdf5Bag:
        with h5py.File(path, "r+") as file:
            rows = file["observations/images/a"] if "observations" in file else None
            if rows is None:
                pytest.skip("its chunks are compressed")
            rows[-1] = 0
    else:
        file = path if path.is_file() else max(path.iterdir(), key=lambda file: file.stat().st_size)
        # half of an MCAP file that rosbags wrote is one chunk
        kept = file.stat().st_size * (90 if path.is_dir() and file.suffix == ".mcap" else 67) // 100
        file.write_bytes(file.read_bytes()[:kept])


@pytest.fixture(params=FORMATS)
def format_(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
def path(format_: Format, tmp_path: Path) -> Path:
    return format_.write(tmp_path / "take")


def describe(sample: Sample) -> Key:
    payload = sample.payload
    if not isinstance(payload, CameraInfo | Joints):
        payload = zlib.crc32(payload.data)  # type: ignore[assignment]
    return sample.topic, sample.stamp_ns, sample.logged_ns, payload


def read(reader: SampleReader, begin_ns: int = 0) -> list[Key]:
    return [describe(sample) for sample in reader.samples({topic.name for topic in reader.topics}, begin_ns)]


def test_each_reading_begins_anew_and_loses_nothing(format_: Format, path: Path) -> None:
    with format_.reader(path) as reader:
        next(reader.samples({reader.topics[0].name}))
        samples = read(reader)
        assert read(reader) == samples
        assert {str(topic) for topic, *_ in samples} == {topic.name for topic in reader.topics}
        assert reader.lost is None


def test_only_the_chosen_topics_come(format_: Format, path: Path) -> None:
    with format_.reader(path) as reader:
        samples = read(reader)
        for topic in reader.topics:
            chosen = [describe(sample) for sample in reader.samples({topic.name})]
            assert chosen == [sample for sample in samples if sample[0] == topic.name]
        assert not list(reader.samples({"/absent"}))


def test_a_reader_that_can_seek_begins_at_the_time(format_: Format, path: Path) -> None:
    with format_.reader(path) as reader:
        samples = read(reader)
        begin_ns = sorted(int(str(sample[2])) for sample in samples)[len(samples) // 2]
        expected = [sample for sample in samples if not reader.can_seek or int(str(sample[2])) >= begin_ns]
        assert read(reader, begin_ns)[-len(expected) :] == expected
        if reader.can_seek:
            assert len(read(reader, begin_ns)) < len(samples)
            sample = next(reader.samples({reader.topics[0].name}, begin_ns))
            assert sample.number == [key[0] for key in samples].count(sample.topic) - len(
                [key for key in expected if key[0] == sample.topic]
            )


def test_a_damaged_tail_leaves_every_complete_sample(format_: Format, path: Path) -> None:
    with format_.reader(path) as reader:
        samples = read(reader)
    damage(path, format_.reader)
    with format_.reader(path) as reader:
        left = read(reader)
        assert reader.lost is not None
        assert read(reader) == left
    complete = left[:-1] if format_.reader is VideoBag else left  # its last picture may be cut
    assert complete == [sample for sample in samples if sample in complete]
    assert len(samples) // 3 <= len(left) < len(samples)


def test_closing_is_idempotent_and_the_file_can_be_opened_again(format_: Format, path: Path) -> None:
    for _ in range(2):
        reader = format_.reader(path)
        next(reader.samples({reader.topics[0].name}))
        reader.close()
        reader.close()


def test_the_first_reader_that_recognises_a_recording_is_its_own(format_: Format, path: Path) -> None:
    assert next(reader for reader in READERS if reader.recognises(path)) is format_.reader
    with open_bag(path) as bag:
        assert len(list(bag)) > 1
        assert bag.lost is None


def test_other_files_are_not_recognised_and_refused(format_: Format, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text.txt").write_text("no recording\n" * 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(5000))
    for name in ("empty", "text.txt", "noise", "folder", "absent"):
        path = tmp_path / name
        if path.exists():
            assert not format_.reader.recognises(path)
        if path.suffix != ".txt":  # ffmpeg plays text as a terminal
            with pytest.raises((BagError, OSError)):
                format_.reader(path)

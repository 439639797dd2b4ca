"""One stream that cannot be read is left out and named; the rest of the recording is read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mcap")
pytest.importorskip("mcap_ros2")
pytest.importorskip("foxglove_schemas_protobuf")
pytest.importorskip("rosbags")

from sam3_node.bags.bag import open_bag
from sam3_node.bags.discovery import MAX_FAILURES, probe
from sam3_node.bags.formats.mcap import McapBag
from sam3_node.errors import BagError
from tests.support import ros_recordings
from tests.support.mcap_files import COLOUR, DEPTH, T0, Moment, jpeg, rgbd, write_mcap, write_ros2
from tests.support.refuses import refuses


def test_a_depth_of_an_unknown_encoding_is_left_out(tmp_path: Path) -> None:
    moments = [replace(m, encoding="rvl") if m.topic == DEPTH else m for m in rgbd(5)]
    with open_bag(write_ros2(tmp_path / "r.mcap", moments)) as bag:
        frames = list(bag)
        assert f"skipped {DEPTH}" in str(bag.lost)
        assert "'rvl'" in str(bag.lost)
    assert len(frames) == 5
    assert all(frame.depth is None and frame.intrinsics is not None for frame in frames)


def test_a_camera_of_an_unknown_encoding_is_left_out_unless_chosen(tmp_path: Path) -> None:
    odd = [replace(m, topic="/odd/image_raw", encoding="nv24") for m in rgbd(5) if m.topic == COLOUR]
    path = write_ros2(tmp_path / "r.mcap", [*odd, *rgbd(5)])
    with open_bag(path) as bag:
        assert len(bag.cameras) == 1
        assert len(list(bag)) == 5
        assert "skipped the camera odd" in str(bag.lost)
    with refuses(BagError, field="nv24"):
        open_bag(path, ["odd"])
    with refuses(BagError, field="nv24"):
        open_bag(write_ros2(tmp_path / "odd.mcap", odd))


def test_a_number_beyond_all_bounds_costs_one_message(tmp_path: Path) -> None:
    def encode(moment: Moment) -> tuple[str, bytes, bytes]:
        text = json.dumps(
            {
                "timestamp": {"sec": 1, "nsec": 0},
                "width": 1,
                "height": 1,
                "encoding": "mono8",
                "step": 1,
                "data": "AA==",
            }
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
    with sqlite3.connect(copy) as database:
        (number,) = database.execute("SELECT max(id) FROM topics").fetchone()
        database.execute("PRAGMA writable_schema=ON")
        database.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'topics'")
    with sqlite3.connect(copy) as database:
        database.execute("INSERT INTO topics (id, serialization_format) VALUES (?, 'cdr')", (number + 1,))
    with open_bag(copy) as bag:
        assert len(list(bag)) == 3


def test_first_messages_are_found_in_few_passes(tmp_path: Path) -> None:
    """Topics that begin late, and some that cannot be read, cost a few passes and not one each."""
    good = next(iter(rgbd(1)))
    moments = [replace(good, topic=f"/c{number}/image", stamp_ns=T0 + number) for number in range(60)]
    moments += [replace(good, topic="/c0/image", stamp_ns=T0 + number) for number in range(100, 400)]
    moments += [replace(good, topic=f"/late{number}/image", stamp_ns=T0 + 1000) for number in range(3)]
    moments += [replace(good, topic=f"/odd{number}/image", encoding="hsv8") for number in range(2)]
    reader = McapBag(write_ros2(tmp_path / "r.mcap", moments))
    passes, read = [], reader.samples
    reader.samples = lambda topics: passes.append(len(topics)) or read(topics)  # type: ignore[method-assign]
    found = probe(reader, [topic.name for topic in reader.topics])
    assert len(found) == 65
    assert {name for name, first in found.items() if isinstance(first, BagError)} == {
        "/odd0/image",
        "/odd1/image",
    }
    assert len(passes) <= 6


def test_hundreds_of_topics_that_cannot_be_read_are_refused_in_bounded_passes(tmp_path: Path) -> None:
    odd = [replace(next(iter(rgbd(1))), topic=f"/c{number}/image", encoding="hsv8") for number in range(100)]
    reader = McapBag(write_ros2(tmp_path / "r.mcap", odd))
    passes, read = [], reader.samples
    reader.samples = lambda topics: passes.append(len(topics)) or read(topics)  # type: ignore[method-assign]
    found = probe(reader, [topic.name for topic in reader.topics])
    assert len(found) == 100
    assert all(isinstance(first, BagError) for first in found.values())
    assert len(passes) == MAX_FAILURES


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

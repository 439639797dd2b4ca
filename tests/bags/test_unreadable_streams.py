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
from sam3_node.bags.formats.mcap import McapBag
from sam3_node.errors import BagError
from tests.support import ros_recordings
from tests.support.mcap_files import COLOUR, DEPTH, Moment, rgbd, write_mcap, write_ros2


def test_a_depth_of_an_unknown_encoding_is_left_out(tmp_path: Path) -> None:
    moments = [replace(m, encoding="rvl") if m.topic == DEPTH else m for m in rgbd(5)]
    with open_bag(write_ros2(tmp_path / "r.mcap", moments)) as bag:
        frames = list(bag)
        assert bag.lost is not None
        assert f"{DEPTH} is left out" in bag.lost
        assert "'rvl'" in bag.lost
    assert len(frames) == 5
    assert all(frame.depth is None and frame.intrinsics is not None for frame in frames)


def test_a_camera_of_an_unknown_encoding_is_left_out_unless_chosen(tmp_path: Path) -> None:
    odd = [replace(m, topic="/odd/image_raw", encoding="nv24") for m in rgbd(5) if m.topic == COLOUR]
    path = write_ros2(tmp_path / "r.mcap", [*odd, *rgbd(5)])
    with open_bag(path) as bag:
        assert len(bag.cameras) == 1
        assert len(list(bag)) == 5
        assert bag.lost is not None
        assert "the camera odd is left out" in bag.lost
    with pytest.raises(BagError, match="found 'nv24'"):
        open_bag(path, ["odd"])
    with pytest.raises(BagError, match="found 'nv24'"):
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

"""The joints of robots in recordings of other programs, against the libraries of their formats."""

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet
import pytest
from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory
from rosbags.highlevel import AnyReader

from sam3_node.bags import open_bag
from sam3_node.types import NANOSECONDS, JointState
from tests.support import mcap_files, ros_recordings
from tests.support.hdf5_files import make_pictures, write_aloha, write_robomimic
from tests.support.mcap_files import T0, Moment, rgbd
from tests.support.paths import ROOT

TOPIC, WANTED = "/arm/joint_states", "/arm/joint_states_desired"
PERIOD_NS = 10_000_000


def joint_moments() -> list[Moment]:
    """Return the messages of an arm and, apart, of its gripper, one of velocities alone, and those of another topic."""
    moments = []
    for row in range(6):
        stamp_ns = T0 + row * PERIOD_NS
        arm = ("elbow", "wrist"), (row / 8, -0.5), (0.1, 0.1)
        finger = ("finger",), (0.04 / (row + 1),), ()
        moments.append(Moment(WANTED, "joints", stamp_ns, joints=(("elbow",), (9.0,), ())))
        moments.append(Moment(TOPIC, "joints", stamp_ns, joints=finger if row % 2 else arm))
    return [*moments, Moment(TOPIC, "joints", T0, joints=(("elbow",), (), (0.1,)))]


def read_joints(path: Path) -> list[JointState]:
    with open_bag(path) as bag:
        found = list(bag.robot())
        assert list(bag)
        assert bag.lost is None
    assert all(isinstance(message, JointState) for message in found)
    return found  # type: ignore[return-value]


def read_by_rosbags(path: Path) -> list[Any]:
    with AnyReader([path]) as reader:
        chosen = [connection for connection in reader.connections if connection.topic == TOPIC]
        return [reader.deserialize(data, item.msgtype) for item, _, data in reader.messages(chosen)]


def read_by_mcap(path: Path) -> list[Any]:
    with path.open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        return [message for *_, message in reader.iter_decoded_messages([TOPIC], log_time_order=False)]


@pytest.mark.parametrize("form", ["ros 1", "ros 2", "mcap"])
def test_joint_states_of_ros_are_read_as_other_readers_do(tmp_path: Path, form: str) -> None:
    moments = [*rgbd(3), *joint_moments()]
    if form == "mcap":
        path = mcap_files.write_ros2(tmp_path / "take.mcap", moments)
        expected = read_by_mcap(path)
    else:
        is_first = form == "ros 1"
        path = tmp_path / ("take.bag" if is_first else "take")
        writer = ros_recordings.Writer1(path) if is_first else ros_recordings.Writer2(path, version=9)
        store = mcap_files.ROS1 if is_first else mcap_files.ROS2
        messages = ((item.topic, item.logged_ns, mcap_files.ros_message(item, store)) for item in moments)
        expected = read_by_rosbags(ros_recordings.write_by_rosbags(writer, store, messages))
    known: dict[str, float] = {}
    whole = []
    for message in expected:
        if len(message.position):
            known |= dict(zip(message.name, message.position, strict=True))
            stamp = message.header.stamp
            whole.append(JointState("robot", stamp.sec * NANOSECONDS + stamp.nanosec, dict(known)))
    assert len(whole) == 6
    assert read_joints(path) == whole


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_dataset_of_lerobot_has_its_motors_in_degrees(tmp_path: Path, version: str) -> None:
    path = Path(shutil.copytree(ROOT / "tests/data/lerobot" / version, tmp_path / "dataset"))
    tables = map(pyarrow.parquet.read_table, sorted((path / "data").rglob("*.parquet")))
    states = [row for table in tables for row in table["observation.state"].to_pylist()]
    with open_bag(path) as bag:
        stamps = [frame.capture_ns for frame in bag if frame.camera == bag.cameras[0]]
    found = read_joints(path)
    assert [(joints.robot, joints.stamp_ns, joints.clock) for joints in found] == [
        ("robot", stamp_ns, "device") for stamp_ns in stamps
    ]
    assert all([*joints.positions] == ["shoulder_pan", "elbow_flex", "gripper"] for joints in found)
    np.testing.assert_allclose([[*joints.positions.values()] for joints in found], np.radians(states))


def test_joints_of_hdf5_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    path = write_aloha(tmp_path / "episode_0.hdf5", {"cam_high": make_pictures(20)}, fps=50)
    with h5py.File(path, "r+") as file:
        file["observations/qpos"][7, 3] = np.nan
    assert [joints.stamp_ns * 50 // NANOSECONDS for joints in read_joints(path)] == [*range(7), *range(8, 20)]


@pytest.mark.parametrize("form", ["aloha", "robomimic"])
def test_joints_of_hdf5_have_numbers_as_names(tmp_path: Path, form: str) -> None:
    path = tmp_path / "episode_0.hdf5"
    if form == "aloha":
        names = [write_aloha(path, {"cam_high": make_pictures(20)}, fps=50) and "observations/qpos"]
    else:
        write_robomimic(path, {2: make_pictures(3), 10: make_pictures(17)})
        names = [f"data/demo_{number}/obs/robot0_joint_pos" for number in (2, 10)]
    with h5py.File(path) as file:
        expected = np.concatenate([file[name][:] for name in names])
    found = read_joints(path)
    period_ns = NANOSECONDS // (50 if form == "aloha" else 20)
    assert [joints.stamp_ns for joints in found] == [row * period_ns for row in range(20)]
    assert {(joints.robot, joints.clock) for joints in found} == {("robot", "device")}
    assert all(
        [*joints.positions] == [str(number) for number in range(expected.shape[1])] for joints in found
    )
    assert np.array_equal([[*joints.positions.values()] for joints in found], expected)

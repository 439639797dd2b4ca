"""The joints of robots in recordings of other programs, against the libraries of their formats."""

import json
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
from sam3_node.calibration.poses import JointTracks
from sam3_node.errors import CalibrationError
from sam3_node.types import NANOSECONDS, JointState
from tests.support import mcap_files, ros_recordings
from tests.support.hdf5_files import make_pictures, write_aloha, write_robomimic
from tests.support.mcap_files import T0, Moment, rgbd
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.tables import each_row

TOPIC = "/arm/joint_states"
WANTED = "/arm/joint_states_desired"
PERIOD_NS = 10_000_000


def joint_moments() -> list[Moment]:
    """Return the messages of an arm and, apart, of its gripper, one of velocities alone, and those of another topic."""
    sent: list[Any] = [(TOPIC, 0, (("elbow",), (), (0.1,)))]
    for row in range(6):
        arm = (("elbow", "wrist"), (row / 8, -0.5), (0.1, 0.1))
        finger = (("finger",), (0.04 / (row + 1),), ())
        sent += [(WANTED, row, (("elbow",), (9.0,), ())), (TOPIC, row, finger if row % 2 else arm)]
    return [Moment(topic, "joints", T0 + row * PERIOD_NS, joints=joints) for topic, row, joints in sent]


def read_joints(path: Path) -> list[JointState]:
    with open_bag(path) as bag:
        found = list(bag.robot())
        assert list(bag)
        assert bag.lost is None
    assert all(isinstance(message, JointState) for message in found)
    return found  # type: ignore[return-value]


def check(found: list[JointState], stamps: list[int], names: list[str], positions: Any) -> None:
    """Compare the joints of a dataset with its rows [n, joints]."""
    assert [joints.stamp_ns for joints in found] == stamps
    assert {(joints.robot, joints.clock, *joints.positions) for joints in found} == {
        ("robot", "device", *names)
    }
    np.testing.assert_allclose([[*joints.positions.values()] for joints in found], positions, rtol=0)


@pytest.mark.verifies(
    "recording",
    "`sensor_msgs/JointState`: arms in turn, several topics",
    "other implementation",
    "rosbags and mcap-ros2-support read the same",
    "a recording of a robot",
)
@pytest.mark.parametrize("form", ["ros 1", "ros 2", "mcap"])
def test_joint_states_of_ros_are_read_as_other_readers_do(tmp_path: Path, form: str) -> None:
    moments = [*rgbd(3), *joint_moments()]
    if form == "mcap":
        path = mcap_files.write_ros2(tmp_path / "take.mcap", moments)
        with path.open("rb") as file:
            reader = make_reader(file, decoder_factories=[DecoderFactory()])
            expected = [
                message for *_, message in reader.iter_decoded_messages([TOPIC], log_time_order=False)
            ]
    else:
        path = tmp_path / "take.bag"
        store = mcap_files.ROS1
        writer = ros_recordings.Writer1(path)
        if form == "ros 2":
            path = tmp_path / "take"
            store = mcap_files.ROS2
            writer = ros_recordings.Writer2(path, version=9)
        messages = ((item.topic, item.logged_ns, mcap_files.ros_message(item, store)) for item in moments)
        with AnyReader([ros_recordings.write_by_rosbags(writer, store, messages)]) as bag:
            chosen = [connection for connection in bag.connections if connection.topic == TOPIC]
            expected = [bag.deserialize(data, item.msgtype) for item, _, data in bag.messages(chosen)]
    whole = []
    for message in expected:
        if len(message.position):
            positions = dict(zip(message.name, message.position, strict=True))
            stamp = message.header.stamp
            whole.append(JointState("robot", stamp.sec * NANOSECONDS + stamp.nanosec, positions))
    assert len(whole) == 6
    assert read_joints(path) == whole


@pytest.mark.verifies(
    "recording",
    "LeRobot: `observation.state` as joints",
    "own package",
    "lerobot 0.3.3 and 0.4.4 wrote the datasets",
    "motors in percent, which are told",
)
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_dataset_of_lerobot_has_its_motors_in_degrees(tmp_path: Path, version: str) -> None:
    path = Path(shutil.copytree(ROOT / "tests/data/lerobot" / version, tmp_path / "dataset"))
    tables = map(pyarrow.parquet.read_table, sorted((path / "data").rglob("*.parquet")))
    states = [row for table in tables for row in table["observation.state"].to_pylist()]
    with open_bag(path) as bag:
        stamps = [frame.capture_ns for frame in bag if frame.camera == bag.cameras[0]]
    check(read_joints(path), stamps, ["shoulder_pan", "elbow_flex", "gripper"], np.radians(states))


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
    stamps = [row * NANOSECONDS // (50 if form == "aloha" else 20) for row in range(20)]
    check(read_joints(path), stamps, [str(number) for number in range(expected.shape[1])], expected)


def merge(path: Path, *chosen: str, **topics: tuple[str, ...]) -> tuple[dict[str, float], str]:
    """Record topics with joints, all at the number of their topic. Return the last joints, and the notes."""
    sent = [
        Moment(
            "/" + name.replace("__", "/"),
            "joints",
            T0 + row * PERIOD_NS,
            joints=(names, (at,) * len(names), ()),
        )
        for row in range(4)
        for at, (name, names) in enumerate(topics.items())
    ]
    mcap_files.write_ros2(path, [*rgbd(3), *sent])
    with open_bag(path, chosen) as bag:
        found = list(bag.robot())
        assert len(list(bag)) == 3
        last: dict[str, float] = {}
        for joints in found:
            assert isinstance(joints, JointState)
            last |= joints.positions
        return last, " ".join(bag.notes)


ARM = ("shoulder", "elbow")


def test_a_topic_that_ends_leaves_its_joints_unknown(tmp_path: Path) -> None:
    sent = [
        Moment("/hand/joints", "joints", T0 + row * PERIOD_NS, joints=(("finger",), (1.0,), ()))
        for row in range(60)
    ]
    arm = [
        Moment("/arm/joints", "joints", T0 + row * PERIOD_NS + 1, joints=(ARM, (2.0, 3.0), ()))
        for row in range(9)
    ]
    path = mcap_files.write_ros2(
        tmp_path / "take.mcap", sorted([*rgbd(3), *sent, *arm], key=lambda item: item.stamp_ns)
    )
    tracks = JointTracks(1000, 10_000)
    for joints in read_joints(path):
        tracks.add_joints(joints)
    at_ns = T0 + 8 * PERIOD_NS
    assert tracks.at(at_ns, 5 * PERIOD_NS) == {"finger": 1.0, "shoulder": 2.0, "elbow": 3.0}
    with refuses(CalibrationError, field="shoulder, elbow"):
        tracks.at(at_ns + 30 * PERIOD_NS, 5 * PERIOD_NS)


def test_topics_of_joints_are_merged(tmp_path: Path) -> None:
    found, notes = merge(tmp_path / "take.mcap", arm__joint_states=ARM, h=("finger",))
    assert found == {"shoulder": 0, "elbow": 0, "finger": 1}
    assert (
        notes
        == "joints come from 2 topics, /h, /arm/joint_states: a message has those of its own topic alone"
    )


@pytest.mark.verifies(
    "recording",
    "`sensor_msgs/JointState`: arms in turn, several topics",
    "layout",
    "of a leader's and a follower's topic, the follower's state counts, and a note names both",
)
@pytest.mark.parametrize(
    "topics",
    [
        {"puppet__joints": ARM, "master__joints": ARM},
        {"joint_states": ARM, "goal": ARM},
        {"joint_states": ARM, "arm__joint_states": ("elbow",)},
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_of_topics_with_the_same_joints_the_state_counts_and_is_told(
    tmp_path: Path, topics: dict[str, tuple[str, ...]], backwards: bool
) -> None:
    wanted, other = (f"/{name.replace('__', '/')}" for name in topics)
    items = list(topics.items())
    order = dict(items[::-1] if backwards else items)
    found, notes = merge(tmp_path / "take.mcap", **order)
    assert found == dict.fromkeys(ARM, float(backwards))
    assert wanted in notes
    assert other in notes
    chosen, notes = merge(tmp_path / "again.mcap", other, **order)
    assert chosen == dict.fromkeys(topics[other.strip("/").replace("/", "__")], float(not backwards))
    assert not notes


@each_row(
    ("names", "named"),
    [
        ([["shoulder_pan", "elbow_flex", "gripper"]], None),
        (["shoulder_pan.pos", "elbow_flex.pos", "gripper.pos"], "degrees"),
        (["shoulder_pan", "elbow_flex"], "2 names"),
        (["shoulder_pan", "elbow_flex", "gripper", "more"], "4 names"),
        ({"arm": ["shoulder_pan", "elbow_flex"], "hand": ["gripper"]}, "groups arm, hand"),
        (["a", "b", "a"], "a twice"),
        ([["a", "b"], ["c"]], "expected names"),
    ],
)
def test_names_of_lerobot_s_states_are_read_or_told(tmp_path: Path, names: Any, named: str | None) -> None:
    path = Path(shutil.copytree(ROOT / "tests/data/lerobot/v3.0", tmp_path / "dataset"))
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.state"]["names"] = names
    (path / "meta/info.json").write_text(json.dumps(info))
    with open_bag(path) as bag:
        found = list(bag.robot())
        notes = " ".join(bag.notes)
    assert bool(found) == (named in (None, "degrees"))
    assert (named or "") in notes
    assert bool(notes) == (named is not None)

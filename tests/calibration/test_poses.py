"""Files of robot poses in three forms, and poses at the time of an image."""

import json
from pathlib import Path

import numpy as np
import pytest

from sam3_node.calibration.poses import JointTracks, PoseTrack, read_poses
from sam3_node.errors import CalibrationError
from sam3_node.geometry import rigid, rotation_from_vector
from sam3_node.types import FramePose, JointState
from tests.support.refuses import refuses
from tests.support.tables import each_row

MATRIX: list[list[float]] = [[0, -1, 0, 0.1], [1, 0, 0, 0.2], [0, 0, 1, 0.3], [0, 0, 0, 1]]
QUATERNION = [0, 0, 0.5**0.5, 0.5**0.5]
TOML = """
unit = "mm"
[[poses]]
image = "a.png"
position = [100, 200, 300]
quaternion_xyzw = [0, 0, 0.70710678, 0.70710678]
"""
CSV = "image,stamp_ns,x,y,z,qx,qy,qz,qw\na.png,5,0.1,0.2,0.3,0,0,0.70710678,0.70710678\n"
NAMES = ",".join(f"m{row}{column}" for row in range(4) for column in range(4))
CSV_MATRIX = f"stamp_ns,{NAMES}\n7,0,-1,0,0.1,1,0,0,0.2,0,0,1,0.3,0,0,0,1\n"
INCHES = [3.937008, 7.874016, 11.811024]
MS = 1_000_000
HOUR_NS = 3600 * 1000 * MS


def dump(unit: str = "m", **entry: object) -> str:
    """Return the JSON of a file with one pose."""
    return json.dumps({"unit": unit, "poses": [entry]})


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@each_row(
    ("name", "text"),
    [
        ("poses.json", dump(image="a.png", matrix=MATRIX)),
        ("poses.json", dump(image="a.png", position=[0.1, 0.2, 0.3], quaternion_xyzw=QUATERNION)),
        ("poses.toml", TOML),
        ("poses.csv", CSV),
        ("poses.csv", CSV_MATRIX),
        (
            "poses.csv",
            "﻿image, x_mm, y_mm, z_mm, qx, qy, qz, qw\na.png, 100, 200, 300, 0, 0, 0.70710678, 0.70710678\n",
        ),
        ("poses.csv", "image;x_cm;y_cm;z_cm;qx;qy;qz;qw\na.png;10,0;20,0;30,0;0;0;0,70710678;0,70710678\n"),
        ("poses.csv", "sep=;\nimage;x;y;z;rx_rad;ry_rad;rz_rad\na.png;0.1;0.2;0.3;0;0;1.570796327\n"),
        ("poses.csv", "image,x,y,z,rx,ry,rz\na.png,0.1,0.2,0.3,0,0,1.570796327\n"),
        ("poses.CSV", CSV.upper().replace(",", "\t")),
        ("poses.tsv", CSV.replace(",", "\t").replace("\n", "\r\n")),
        (
            "poses.csv",
            '"image","x","y","z","qx","qy","qz","qw"\n"a","0,1","0.2","0.3",0,0,0.7071068,0.7071068\n',
        ),
        ("poses.tum", "# timestamp tx ty tz qx qy qz qw\n5.25 0.1 0.2 0.3 0 0 0.70710678 0.70710678\n"),
        ("poses.txt", dump(image="a.png", matrix=MATRIX)),
        ("poses.json", dump("in", position=INCHES, rotation_vector_rad=[0, 0, np.pi / 2])),
    ],
)
def test_all_forms_say_the_same(name: str, text: str, tmp_path: Path) -> None:
    (pose,) = read_poses(write(tmp_path, name, text))
    np.testing.assert_allclose(pose.base_from_gripper, MATRIX, atol=1e-6)


def test_times_and_encodings_of_tables(tmp_path: Path) -> None:
    tum = write(tmp_path, "a.tum", "1700000000.123456789 0.1 0.2 0.3 0 0 0 1\n")
    assert read_poses(tum)[0].stamp_ns == 1_700_000_000_123_456_789
    wide = tmp_path / "wide.txt"
    wide.write_bytes(CSV.replace(",", "\t").encode("utf-16"))
    assert read_poses(wide)[0].stamp_ns == 5


HEADER = "image,x,y,z,qx,qy,qz,qw\n"


def entry(**fields: object) -> str:
    return dump(**{"position": [0, 0, 0], "quaternion_xyzw": [0, 0, 0, 1]} | fields)


@each_row(
    ("name", "text", "named"),
    [
        ("a.csv", "image,x,y,z,rx,ry,rz\na,0.4,0,0.4,0,0,90\n", "length 90.*degrees, or Euler angles"),
        (
            "a.json",
            json.dumps({"poses": [{"rvec": 1, "matrix": MATRIX}] * 30}),
            r"rvec: unknown, exp[^;]*\(30 times",
        ),
        ("a.json", '{"poses": [3]}', "poses: expected a table"),
        ("a.json", entry(position=[100, 200, 300]), r"mm"),
        ("a.json", entry(quaternion_xyzw=[0, 0, 0, 2]), r"length 2"),
        ("a.json", entry(quaternion_xyzw=[0, 0, 1]), r"quaternion_xyzw"),
        ("a.json", entry(position=None), r"matrix.*position"),
        ("a.json", entry(matrix=MATRIX), r"matrix.*position"),
        ("a.json", dump(matrix=np.diag([-1.0, 1, 1, 1]).tolist()), r"reflection"),
        ("a.json", dump(matrix=np.diag([2.0, 1, 1, 1]).tolist()), r"rigid.*matrix"),
        ("a.json", json.dumps({"poses": []}), r"poses"),
        (
            "a.json",
            json.dumps({"poses": [{"image": f"{n}/a.png", "matrix": MATRIX} for n in "xy"]}),
            r"a\.png",
        ),
        ("a.json", entry(colour="red"), r"colour"),
        ("a.json", "[1, 2]", r"file.*poses"),
        ("a.json", "{", r"poses"),
        ("a.csv", "image,x,y,z,roll,pitch,yaw\na,0,0,0,0,0,0\n", "convert Euler angles"),
        ("a.csv", "image,x,y,z,q1,q2,q3,q4\na,0,0,0,0,0,0,1\n", "q1, q2, q3, q4: name them"),
        ("a.csv", "image,x,y,z,rx_rad,ry_rad,rz_rad\na,0,0,0,180,0,0\n", "in degrees"),
        ("a.csv", "a.png,0.4,0,0.4,1,0,0,0\n", "expected a header"),
        ("a.txt", "1 0 0 0 0 1 0 0 0 0 1 0\n", "expected a header"),
        ("a.csv", HEADER + "a,0,4,0,0,4,1,0,0,0\n", "line 2: expected 8 columns, found 10; decimal commas"),
        ("a.csv", HEADER + "a,0.4,0,0.4,1,0\n", "line 2, column qz"),
        ("a.csv", HEADER + "a,nan,0,0.4,1,0,0,0\n", "line 2, column x: expected a finite number"),
        ("a.csv", HEADER + 'a,"1,234.5",0,0.4,1,0,0,0\n', "line 2, column x: expected a number"),
        ("a.csv", HEADER.replace(",", ";") + "a;0,4;0;0,4;1;0;0;0\n" * 2, "semicolons.*two for a"),
        ("a.csv", "stamp_ns,x,y,z,qx,qy,qz,qw\n1.7E+18,0,0,0,0,0,0,1\n", "all digits of a time"),
        ("a.csv", "x,x,y,z,qx,qy,qz,qw\n1,0,0,0,0,0,0,1\n", "two of x"),
        ("a.yaml", "poses: []\n", r"\.csv .*\.json or \.toml, found \.yaml"),
        ("poses", HEADER, "found no suffix"),
        ("a.json", "[" * 100_000, "cannot read poses"),
        ("a.json", dump(matrix=np.array(MATRIX).T.tolist()), "transposed"),
        ("a.json", dump(rvec=[0, 0, 0]), "rvec: unknown, expected position, quaternion"),
    ],
)
def test_what_a_file_has_and_should_have_is_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=named):
        read_poses(write(tmp_path, name, text))


def test_a_file_may_hold_inverse_poses_and_poses_of_the_board(tmp_path: Path) -> None:
    entry = {"matrix": MATRIX, "board": {"position": [1, 2, 30], "quaternion_xyzw": [0, 0, 0, 1]}}
    text = json.dumps({"inverse": True, "board_unit": "mm", "poses": [entry]})
    (pose,) = read_poses(write(tmp_path, "poses.json", text))
    np.testing.assert_allclose(pose.base_from_gripper @ np.array(MATRIX), np.eye(4), atol=1e-12)
    np.testing.assert_allclose(pose.camera_from_board[:3, 3], [0.001, 0.002, 0.03])


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with refuses(CalibrationError, field="nowhere.csv"):
        read_poses(tmp_path / "nowhere.csv")
    with pytest.raises(CalibrationError, match="poses"):
        read_poses(write(tmp_path, "empty.csv", ""))


def make_track() -> PoseTrack:
    track = PoseTrack(capacity=3)
    for stamp in (0, 300, 100, 200):  # in any order; the one that came first is forgotten
        turn = (0.0, 0.0, float(np.sin(stamp / 2000)), float(np.cos(stamp / 2000)))
        track.add(FramePose("gripper", "base", stamp, (stamp / 100, 0, 0), turn))
    return track


def test_poses_are_interpolated() -> None:
    expected = rigid(rotation_from_vector([0, 0, 0.15]), [1.5, 0, 0])
    np.testing.assert_allclose(make_track().at(150, 100), expected, atol=1e-12)
    np.testing.assert_allclose(make_track().at(300, 100)[0, 3], 3.0)


def test_poses_are_extrapolated_up_to_a_bound() -> None:
    track = make_track()
    expected = rigid(rotation_from_vector([0, 0, 0.34]), [3.4, 0, 0])
    np.testing.assert_allclose(track.at(340, 100, 50), expected, atol=1e-12)
    # from a pose that is as far before the last
    np.testing.assert_allclose(track.at(420, 200, 150)[0, 3], 4.2)
    for moment in ((351, 100, 50), (340, 99, 50), (420, 199, 150), (520, 1000, 300), (99, 100, 50)):
        with pytest.raises(CalibrationError, match="before and after"):
            track.at(*moment)
    lonely = PoseTrack()
    lonely.add_matrix(0, np.eye(4))
    with pytest.raises(CalibrationError, match="before and after"):
        lonely.at(1, 100, 50)


@pytest.mark.parametrize(
    ("stamp_ns", "gap_ns", "named"),
    [(50, 100, "before and after"), (301, 100, "before and after"), (150, 99, "a gap of")],
)
def test_stale_poses_are_refused(stamp_ns: int, gap_ns: int, named: str) -> None:
    track = make_track()
    assert len(track) == 3
    with refuses(CalibrationError, field=str(named)):
        track.at(stamp_ns, gap_ns)
    with refuses(CalibrationError, field="none"):
        PoseTrack().at(0, 100)


def make_set_back_track(count: int, capacity: int) -> PoseTrack:
    """Return the track of a clock that was an hour ahead for `count` poses, and then right for three, at 100 Hz."""
    track = PoseTrack(capacity)
    for index in range(count):
        track.add_matrix(HOUR_NS + 10 * MS * index, rigid(np.eye(3), [99, 0, 0]))
    for index in range(3):
        track.add_matrix(10 * MS * index, rigid(np.eye(3), [index, 0, 0]))
    return track


@pytest.mark.parametrize("count", [1, 10, 600])
def test_a_clock_that_was_ahead_hinders_no_later_pose(count: int) -> None:
    track = make_set_back_track(count, capacity=100)
    assert track.at(15 * MS, 100 * MS)[0, 3] == pytest.approx(1.5)
    assert track.at(25 * MS, 100 * MS, 20 * MS)[0, 3] == pytest.approx(2.5)
    with refuses(CalibrationError, field="gap"):
        track.at(50 * MS, 100 * MS, 20 * MS)


def test_the_poses_that_came_longest_ago_are_forgotten() -> None:
    track = make_set_back_track(600, capacity=3)
    assert len(track) == 3
    with refuses(CalibrationError, field="before and after"):
        track.at(HOUR_NS, 100 * MS)


def test_poses_after_a_time_are_forgotten_and_the_rest_goes_on() -> None:
    track = make_set_back_track(2, capacity=4)
    track.forget_after(10 * MS)
    assert len(track) == 2
    for index in range(3, 6):
        track.add_matrix(10 * MS * index, np.eye(4))
    assert (
        len(track) == 4
    )  # those that came first are forgotten first, also after poses were forgotten by time
    assert track.at(10 * MS, 0)[0, 3] == 1
    with refuses(CalibrationError, field="before and after"):
        track.at(0, 0)


def test_a_track_of_many_joints_keeps_fewer_states() -> None:
    for joints, kept in ((1, 10), (4, 5), (20, 2), (50, 2)):
        tracks = JointTracks(capacity=10, max_values=20)
        names = [str(number) for number in range(joints)]
        for stamp in range(30):
            tracks.add_joints(JointState("arm", stamp, dict.fromkeys(names, float(stamp))))
        assert len(tracks) == kept
        assert tracks.at(29, 1) == dict.fromkeys(names, 29.0)

"""URDFs, meshes and joints as users have them: what they mean is drawn, and what cannot be meant is told by name."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.errors import CalibrationError, SettingsError
from sam3_node.geometry import pose_of
from sam3_node.perception.objects import Objects
from sam3_node.perception.stages.robot import MAX_REPORTED, FindRobot, Places
from sam3_node.perception.step import StepFrame
from sam3_node.robot.body import RobotBody
from sam3_node.settings import RobotSettings
from sam3_node.types import Frame, Intrinsics, JointState, RobotState
from tests.support.refuses import refuses
from tests.support.tables import each_row

trimesh = pytest.importorskip("trimesh", reason="needs the extra robot")
pytest.importorskip("yourdfpy", reason="needs the extra robot")

BOX = '<box size="0.4 0.1 0.02"/>'
LIMITS = '<limit lower="{}" upper="{}" effort="1" velocity="1"/>'
MIMIC = '<mimic joint="{}" multiplier="{}" offset="{}"/>'
LENS = Intrinsics(60.0, 60.0, 31.5, 23.5)


def link(name: str, geometry: str = BOX) -> str:
    return f'<link name="{name}"><collision><origin xyz="0.2 0 0"/><geometry>{geometry}</geometry></collision></link>'


def joint(
    name: str,
    parent: str,
    child: str,
    kind: str = "revolute",
    more: str = "",
    limits: tuple[float, float] = (-3, 3),
) -> str:
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>'
        f'<axis xyz="0 0 1"/>{LIMITS.format(*limits)}{more}</joint>'
    )


def write(path: Path, *elements: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<robot name="arm"><link name="base"/>{"".join(elements)}</robot>')
    return path


def write_mesh(path: Path, size: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    trimesh.creation.box((size, size, size)).export(path)


def find_size(path: Path) -> float:
    """Return the width of a robot's first body in metres."""
    corners = RobotBody(path)._parts[0].corners
    return float(np.ptp(corners[:, 0]))


def find_turns(body: RobotBody, positions: Mapping[str, float]) -> list[float]:
    """Return the angle of each link about z, in radians."""
    links = body.place(positions)
    return np.arctan2(links[:, 1, 0], links[:, 0, 0]).tolist()


@pytest.mark.verifies(
    "robot",
    "meshes: STL, OBJ, PLY, glTF, Collada with its unit",
    "other implementation",
    "trimesh writes them",
    "meshes of a robot's maker",
)
@pytest.mark.parametrize("unit_m", [1.0, 0.01, 0.001, 0.0254])
def test_a_collada_mesh_has_the_unit_that_it_names(tmp_path: Path, unit_m: float) -> None:
    mesh = tmp_path / "hand.dae"
    trimesh.creation.box((0.3 / unit_m,) * 3).export(mesh)
    unit = f'</modified><unit name="u" meter="{unit_m}"/>'
    mesh.write_text(mesh.read_text().replace("</modified>", unit))
    path = write(tmp_path / "arm.urdf", link("a", '<mesh filename="hand.dae"/>'), joint("j", "base", "a"))
    assert find_size(path) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.verifies(
    "robot",
    "URDF: `package://` of ROS 1 and 2",
    "layout",
    "folders beside and above, ROS_PACKAGE_PATH, AMENT_PREFIX_PATH, package.xml",
    "a package of a robot's maker",
)
@pytest.mark.parametrize("variable", ["", "ROS_PACKAGE_PATH", "AMENT_PREFIX_PATH"])
def test_a_package_is_the_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A mesh of the same path in another package is another mesh."""
    root = tmp_path / "ws/src"
    other = root
    if variable:
        other = tmp_path / "elsewhere"
        monkeypatch.setenv(variable, f"{tmp_path}/none:{other}")
    if variable == "AMENT_PREFIX_PATH":
        other = other / "share"
    write_mesh(root / "arm/meshes/base.stl", 0.1)
    write_mesh(other / "hand/meshes/base.stl", 0.5)
    for package, size in (("arm", 0.1), ("hand", 0.5)):
        body = link("a", f'<mesh filename="package://{package}/meshes/base.stl"/>')
        path = write(root / "arm/urdf/robot.urdf", body, joint("j", "base", "a"))
        assert find_size(path) == pytest.approx(size)


def test_a_package_xml_names_a_folder_of_another_name(tmp_path: Path) -> None:
    write_mesh(tmp_path / "arm-main/meshes/base.stl", 0.1)
    body = link("a", '<mesh filename="package://arm/meshes/base.stl"/>')
    path = write(tmp_path / "arm-main/urdf/robot.urdf", body, joint("j", "base", "a"))
    with refuses(SettingsError, field=("package://arm/meshes/base.stl", "ROS_PACKAGE_PATH", "tried")):
        RobotBody(path)
    (tmp_path / "arm-main/package.xml").write_text("<package><name>arm</name></package>")
    assert find_size(path) == pytest.approx(0.1)


@pytest.mark.verifies(
    "robot", "MJCF, SDF and xacro: refused by name", "layout", "their root elements and macros", ""
)
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('<mujoco model="arm"><worldbody/></mujoco>', ("URDF", "MJCF")),
        ('<sdf version="1.7"><model name="arm"/></sdf>', ("URDF", "SDF")),
        (f'<robot xmlns:xacro="http://www.ros.org/wiki/xacro">{link("a")}<xacro:arm/></robot>', ("xacro", "arm")),
        (f'<robot name="a">{link("a")}<xacro:arm/></robot>', ("xacro", "arm")),
        (f'<robot name="a">{link("a", BOX.replace("0.4", "${length}"))}</robot>', ("xacro", "${length}")),
        (f'<robot name="a">{link("a")}{link("b")}{joint("j", "a", "b")}', "whole"),
        ("", "empty"),
    ],
)  # fmt: skip
def test_what_is_no_urdf_is_named(tmp_path: Path, text: str, named: Any) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text(text)
    with refuses(SettingsError, field=named):
        RobotBody(path)


def test_additions_of_simulators_are_no_fault(tmp_path: Path) -> None:
    addition = '<gazebo><sensor:camera name="${x}"/></gazebo>'
    assert RobotBody(write(tmp_path / "arm.urdf", link("a"), joint("j", "base", "a"), addition)).joints == (
        "j",
    )


@pytest.mark.parametrize(
    ("elements", "named"),
    [
        ((link("a"), joint("free", "base", "a", "floating")), ("free", "floating", "robot.base")),
        ((link("a"), joint("free", "base", "a", "planar"), link("b"), joint("j", "a", "b")), ("free", "planar")),
        ((link("a"), joint("j", "base", "a", more=MIMIC.format("ghost", 1, 0))), ("j", "ghost")),
        ((link("a"), joint("j", "base", "a", more=MIMIC.format("j", 1, 0))), ("circle", "j")),
        ((link("a"), joint("j", "base", "a", "hinge")), ("j", "hinge", "revolute")),
    ],
)  # fmt: skip
def test_a_joint_that_tells_no_place_is_named(tmp_path: Path, elements: tuple[str, ...], named: Any) -> None:
    path = write(tmp_path / "arm.urdf", *(element.replace("base", "foot") for element in elements))
    path.write_text(path.read_text().replace('<link name="base"/>', link("foot")))
    with refuses(SettingsError, field=named):
        RobotBody(path)


def test_a_floating_joint_above_the_robot_is_no_fault(tmp_path: Path) -> None:
    path = write(
        tmp_path / "arm.urdf",
        link("a"),
        joint("free", "base", "a", "floating"),
        link("b"),
        joint("j", "a", "b"),
    )
    assert find_turns(RobotBody(path, "a"), {"j": 0.5})[2] == pytest.approx(0.5)


@pytest.mark.verifies("robot", "URDF: mimic joints", "layout", "chains of them, as published", "")
def test_joints_follow_through_joints_that_follow(tmp_path: Path) -> None:
    path = write(
        tmp_path / "arm.urdf",
        *map(link, "abc"),
        joint("third", "base", "c", more=MIMIC.format("second", -2, 0.1)),
        joint("second", "base", "b", more=MIMIC.format("first", 0.5, 0.2)),
        joint("first", "base", "a"),
    )
    body = RobotBody(path)
    assert body.joints == ("first",)
    # second = 0.5 * 0.6 + 0.2, third = -2 * second + 0.1
    for positions in ({"first": 0.6}, {"second": 0.5}):
        assert sorted(find_turns(body, positions)) == pytest.approx([-0.9, 0.0, 0.5, 0.6])
        assert body.describe_lacking(positions) is None


def test_numbers_count_joints_from_the_base(tmp_path: Path) -> None:
    """Some exporters list the tip first; the numbers count, not their order in the message."""
    tree = (link("a"), link("b"), joint("wrist", "a", "b"), joint("shoulder", "base", "a"))
    body = RobotBody(write(tmp_path / "arm.urdf", *tree))
    for positions in ({"0": 0.5, "1": 0.2}, {"1": 0.2, "0": 0.5}):
        assert find_turns(body, positions) == pytest.approx([0, 0.5, 0.7])
    numbered = [element.replace("shoulder", "1").replace("wrist", "0") for element in tree]
    body = RobotBody(write(tmp_path / "numbered.urdf", *numbered))
    assert find_turns(body, {"0": 0.2, "1": 0.5}) == pytest.approx([0, 0.5, 0.7])


@each_row(
    ("positions", "named"),
    [
        ({"turn": 45.0, "slide": 0.0}, ("turn", "limits", "degrees")),
        ({"turn": -100.0, "slide": 0.0}, ("turn", "-100..100")),
        ({"turn": 0.1, "slide": 40.0}, ("slide", "millimetres")),
        ({"turn": 0.1, "slide": 1.0}, ("slide", "percent")),
        ({"turn": 0.1, "slide": 0.05}, None),
        ({"turn": 1.5 - 4 * np.pi, "slide": 0.0}, None),
        ({"turn": 3.3, "slide": 0.0, "wheel": 900.0}, None),
    ],
)
def test_positions_far_beyond_the_limits_are_reported_with_their_unit(
    tmp_path: Path, positions: dict[str, float], named: Any
) -> None:
    path = write(
        tmp_path / "arm.urdf",
        *map(link, "abc"),
        joint("turn", "base", "a"),
        joint("slide", "a", "b", "prismatic", limits=(0, 0.04)),
        joint("wheel", "b", "c", "continuous"),
    )
    body = RobotBody(path)
    if named is None:
        body.place(positions)
        return
    with refuses(CalibrationError, field=named):
        body.place(positions)


def test_joints_that_do_not_fit_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = RobotBody(
        write(tmp_path / "arm.urdf", link("a"), joint("j", "base", "a"), link("b"), joint("k", "a", "b"))
    )
    stage = FindRobot(body, RobotSettings(), None, Places(Objects(4)), exclude=False)  # type: ignore[arg-type]

    def step(positions: dict[str, float]) -> StepFrame:
        frame = Frame("cam0", 0, 0, 64, 48, "bgr8", b"")
        joints = RobotState(None, JointState("robot", 0, positions))
        pose = pose_of(np.eye(4), "camera", "base", 0, "system")
        found = StepFrame(frame, robot_state=joints, intrinsics=LENS, camera_pose=pose)
        stage.run(found)
        return found

    with caplog.at_level(logging.WARNING):
        assert step({"j": 0.1, "k": 0.2}).problem is None
        assert not caplog.messages
        for _ in range(3):
            problem = str(step({"j": 0.1, "left_k": 0.2}).problem)
        assert problem.startswith("joints without a position: ")
        assert "left_k" in problem
        assert step({"j": 0.1, "k": 0.2, "wheel": 1.0}).problem is None
        assert sum("wheel" in message for message in caplog.messages) == 1
        assert len(caplog.messages) == 3
        for number in range(2 * MAX_REPORTED):
            step({"j": 0.1, f"name{number}": 0.2})
        assert len(caplog.messages) == MAX_REPORTED

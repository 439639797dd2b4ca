"""The robot's pixels from its URDF, against rays that MuJoCo casts at the same URDF."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.calibration import load_calibration
from sam3_node.errors import CalibrationError, SettingsError
from sam3_node.geometry import (
    Array,
    DepthMap,
    RayMap,
    deproject,
    invert,
    pose_of,
    rigid,
    rotation_from_vector,
)
from sam3_node.models import load_tracker
from sam3_node.perception.objects import Objects
from sam3_node.perception.stages.robot import FindRobot, Places
from sam3_node.perception.step import StepFrame
from sam3_node.robot.body import STRIDE, Pixels, RobotBody
from sam3_node.robot.lens_view import LensView
from sam3_node.settings import RobotSettings
from sam3_node.types import Frame, Intrinsics, JointState, RobotState
from sam3_node.wire import decode_depth
from tests.support.refuses import refuses
from tools.scenes.stage import frames

trimesh = pytest.importorskip("trimesh", reason="needs the extra robot")
pytest.importorskip("yourdfpy", reason="needs the extra robot")
mujoco = pytest.importorskip("mujoco")

SIZE = (240, 320)
PINHOLE = Intrinsics(300.0, 310.0, 158.0, 121.0)
LENSES = {
    "pinhole": PINHOLE,
    "brown": Intrinsics(300.0, 310.0, 158.0, 121.0, "brown_conrady", (-0.28, 0.09, 0.001, -0.002, -0.01)),
    "fisheye": Intrinsics(200.0, 205.0, 158.0, 121.0, "fisheye", (0.05, -0.01, 0.003, -0.001)),
}
FAR_M = 5.0
URDF = """<robot name="test">
  <link name="floor"/>
  <link name="foot"><collision><origin xyz="0 0 0.05"/><geometry><box size="0.3 0.2 0.1"/></geometry></collision></link>
  <link name="upper"><collision><origin xyz="0 0 0.2" rpy="0 0 0.4"/>
    <geometry><cylinder radius="0.05" length="0.4"/></geometry></collision></link>
  <link name="lower"><collision><origin rpy="0.3 1.57 0"/><geometry>
      <mesh filename="package://some_robot/meshes/wedge.stl" scale="0.001 0.001 0.001"/></geometry></collision>
    <visual><geometry><sphere radius="3"/></geometry></visual></link>
  <link name="ball"><collision><geometry><sphere radius="0.06"/></geometry></collision></link>
  <link name="left"><collision><geometry><box size="0.02 0.04 0.3"/></geometry></collision></link>
  <link name="right"><collision><geometry><box size="0.02 0.04 0.3"/></geometry></collision></link>
  <joint name="fixed" type="fixed"><parent link="floor"/><child link="foot"/>
    <origin xyz="0.1 -0.2 0.02" rpy="0 0 3.14159265"/></joint>
  <joint name="elbow" type="revolute"><parent link="upper"/><child link="lower"/><origin xyz="0 0 0.4"/>
    <axis xyz="0 2 0"/><limit lower="0.3" upper="2" effort="1" velocity="1"/></joint>
  <joint name="shoulder" type="continuous"><parent link="foot"/><child link="upper"/>
    <origin xyz="0 0 0.1" rpy="0 0.2 0"/><axis xyz="0 0.6 0.8"/></joint>
  <joint name="wrist" type="prismatic"><parent link="lower"/><child link="ball"/><origin xyz="0.3 0 0"/>
    <axis xyz="1 0 0"/><limit lower="0" upper="0.2" effort="1" velocity="1"/></joint>
  <joint name="finger" type="prismatic"><parent link="ball"/><child link="left"/><axis xyz="0 1 0"/>
    <limit lower="0.01" upper="0.1" effort="1" velocity="1"/></joint>
  <joint name="finger2" type="prismatic"><parent link="ball"/><child link="right"/><axis xyz="0 1 0"/>
    <limit lower="-0.1" upper="0" effort="1" velocity="1"/><mimic joint="finger" multiplier="-1"/></joint>
</robot>"""
MUJOCO = '<mujoco><compiler fusestatic="false" boundmass="1" boundinertia="1"/></mujoco></robot>'
Cast = Callable[[dict[str, float], Array, Intrinsics], Array]


def look(eye: Any, target: Any) -> Array:
    forward = np.subtract(target, eye)
    return rigid(frames(forward[None], np.cross(forward, (0, 0, 1.0)))[0], eye)


def see_from(camera: Array, joints: JointState, depth: DepthMap) -> StepFrame:
    frame = Frame("cam0", 0, 0, *SIZE[::-1], "bgr8", b"")
    pose = pose_of(camera, "camera", "base", 0, "system")
    robot = RobotState(None, joints)
    return StepFrame(frame, robot_state=robot, intrinsics=PINHOLE, camera_pose=pose, depth=depth)


def grown(inside: Pixels, px: int = 1) -> Pixels:
    """Return the pixels at most `px` from these along both axes."""
    return cv2.dilate(inside.astype(np.uint8), np.ones((2 * px + 1, 2 * px + 1), np.uint8)) > 0


@pytest.fixture(scope="module")
def urdf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace") / "some_robot"
    for folder in ("urdf", "meshes"):
        (root / folder).mkdir(parents=True)
    trimesh.creation.cone(radius=60, height=300, sections=3).export(root / "meshes/wedge.stl")
    path = root / "urdf/arm.urdf"
    path.write_text(URDF)
    return path


@pytest.fixture(scope="module")
def body(urdf: Path) -> RobotBody:
    return RobotBody(urdf)


@pytest.fixture(scope="module")
def cast(urdf: Path) -> Cast:
    """Cast MuJoCo's rays: depth [h, w] of the body in a camera at base_from_camera, in metres; inf beside it."""
    meshes = {file.name: file.read_bytes() for file in (urdf.parent.parent / "meshes").iterdir()}
    model = mujoco.MjModel.from_xml_string(URDF.replace("</robot>", MUJOCO), meshes)
    data = mujoco.MjData(model)

    def cast(positions: dict[str, float], camera: Array, lens: Intrinsics) -> Array:
        for name, value in {**positions, "finger2": -positions["finger"]}.items():
            data.joint(name).qpos[:] = value
        mujoco.mj_kinematics(model, data)
        rays = deproject(np.indices(SIZE)[::-1].reshape(2, -1).T, 1.0, lens)
        length = np.linalg.norm(rays, axis=1)
        directions = (rays / length[:, None] @ camera[:3, :3].T).ravel()
        geoms = np.zeros(len(rays), np.int32)
        far = np.zeros(len(rays))
        arguments = (None, 1, -1, geoms, far, None, len(rays), mujoco.mjMAXVAL)
        mujoco.mj_multiRay(model, data, camera[:3, 3].copy(), directions, *arguments)
        return np.where(geoms < 0, np.inf, far / length).reshape(SIZE)

    return cast


def draw_joints(seed: int) -> dict[str, float]:
    low_high = ((-3, 0.3, 0, 0.01), (3, 2, 0.2, 0.1))
    values = np.random.default_rng(seed).uniform(*low_high).tolist()
    return dict(zip(("shoulder", "elbow", "wrist", "finger"), values, strict=True))


def cameras(seed: int) -> list[Array]:
    """Return a camera that sees the whole, one that sees a part, and one beside the arm that it reaches behind."""
    angle = np.random.default_rng(seed).uniform(-3, 3)
    side = np.array([np.cos(angle), np.sin(angle), 0.3])
    whole = (1.8 * side, (0, -0.2, 0.4))
    part = (0.8 * side, (0.2, -0.2, 0.7))
    return [look(*view) for view in (whole, part, ((0.35, -0.3, 0.25), (-1.0, 0.1, 0.2)))]


@pytest.mark.verifies(
    "robot",
    "URDF",
    "other implementation",
    "yourdfpy reads it, trimesh casts rays at its bodies",
    "a description of a robot's maker",
)
@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("seed", range(4))
def test_the_silhouette_is_what_rays_hit(body: RobotBody, cast: Cast, lens: str, seed: int) -> None:
    positions = draw_joints(seed)
    view = LensView(LENSES[lens], SIZE)
    for camera in cameras(seed):
        expected = np.isfinite(cast(positions, camera, LENSES[lens]))
        drawn = body.draw(invert(camera) @ body.place(positions), view)
        assert drawn.shape == SIZE
        assert expected.any()
        # near the rim, few pixels differ by more than one: there the lens is least certain, and the body the nearest
        assert (drawn & ~grown(expected)).sum() < 15
        assert (expected & ~grown(drawn)).sum() < 15


def test_with_depth_only_what_lies_on_the_body_is_the_robot(body: RobotBody, cast: Cast) -> None:
    positions = draw_joints(1)
    camera = look((0.9, 0.4, 0.6), (0, -0.2, 0.3))
    z = np.minimum(cast(positions, camera, PINHOLE), FAR_M)
    drawn = z < FAR_M
    columns = np.indices(SIZE)[1]
    middle = int(np.median(columns[drawn]))
    front = drawn & (columns < middle)
    unknown = drawn & (columns > middle + 20)
    z[front] -= 0.1  # a thing in front of it
    z[unknown] = 0
    depth = DepthMap(np.round(z * 1000).astype(np.uint16), 0.001, RayMap().rays(PINHOLE, SIZE), 305.0)
    joints = JointState("robot", 0, positions)
    nano = load_tracker("nano")
    stage = FindRobot(body, RobotSettings(depth_margin_m=0.02), nano, Places(Objects(4)), True)
    seen = stage.see(see_from(camera, joints, depth)).inside
    assert (seen & ~grown(drawn & ~front, STRIDE)).sum() < 0.01 * drawn.sum()
    assert (drawn & ~front & ~grown(seen, STRIDE)).sum() < 0.01 * drawn.sum()
    # what a wrong calibration puts in front of the background, or of another thing, is not the robot
    elsewhere = rigid(np.eye(3), (0, 0.2, 0)) @ camera
    shifted = stage.see(see_from(elsewhere, joints, depth)).inside
    assert shifted[z > 0].sum() < 0.1 * drawn.sum()


def test_positions_are_in_the_base_that_the_calibration_means(urdf: Path, body: RobotBody) -> None:
    positions = draw_joints(2)
    other = RobotBody(urdf, base="foot")
    base_from_foot = rigid(rotation_from_vector((0, 0, np.pi)), (0.1, -0.2, 0.02))
    assert np.abs(base_from_foot @ other.place(positions) - body.place(positions)).max() < 1e-6


def test_a_joint_without_a_position_is_at_zero(body: RobotBody) -> None:
    assert set(body.joints) == {"shoulder", "elbow", "wrist", "finger"}
    rest = dict.fromkeys(body.joints, 0.0)
    assert np.array_equal(body.place({"shoulder": 0.0, "stranger": 7.0}), body.place(rest))
    with refuses(CalibrationError, field=("shoulder", "joint_1")):
        body.place({"joint_1": 0.0})


def test_joints_with_numbers_as_names_are_counted_along_the_tree(body: RobotBody) -> None:
    """Drivers number all joints, or all that turn, and leave out the gripper's fingers."""
    assert body.joints == ("shoulder", "elbow", "wrist", "finger")
    for named in (dict(zip(body.joints, (0.3, 0.4, 0.2, 0.1), strict=True)), {"shoulder": 0.3, "elbow": 0.4}):
        numbered = {str(number): at for number, at in enumerate(named.values())}
        assert np.array_equal(body.place(numbered), body.place(named))
        backwards = dict(reversed(numbered.items()))
        assert np.array_equal(body.place(backwards), body.place(named))
    with refuses(CalibrationError, field=("shoulder", "0, 1, 2")):
        body.place({"0": 0.4, "1": 0.3, "2": 0.2})


@pytest.mark.parametrize(
    ("text", "base", "named"),
    [
        ("<robot", "", "robot.urdf"),
        ('<robot name="a"><link name="l"/></robot>', "", "collision"),
        (URDF, "", "package://some_robot/meshes/wedge.stl"),
        ('<robot name="a"><link name="l"><visual><geometry><sphere radius="1"/></geometry></visual></link></robot>',
         "tool", ("robot.base", "tool", "l")),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, base: str, named: Any) -> None:
    path = tmp_path / "arm.urdf"
    path.write_text(text)
    with refuses(SettingsError, field=named):
        RobotBody(path, base)


def test_the_bundled_arm_is_where_the_recorded_joints_put_it() -> None:
    body = RobotBody(TABLETOP.with_suffix(".urdf"), "camera")
    recording = RecordingReader([TABLETOP])
    calibration = load_calibration(TABLETOP.with_suffix(".toml"))
    rows = zip(recording.frames(), recording.truth(), recording.robot(), strict=True)
    for frame, truth, joints in islice(rows, 0, None, 30):
        lens = frame.intrinsics
        size = (frame.height, frame.width)
        assert lens is not None
        assert calibration.intrinsics_for(size) == lens
        assert frame.depth is not None
        depth = DepthMap(decode_depth(frame.depth), 0.001, RayMap().rays(lens, size), lens.fx)
        view = LensView(lens, size)
        links = body.place(joints.positions)
        objects = np.logical_or.reduce([instance.mask.full() for instance in truth.instances])
        outline = body.draw(links, view) & ~objects
        seen = body.draw(links, view, depth, margin_m=0.01)
        assert outline.sum() > 3000
        assert (seen & outline).sum() > 0.95 * outline.sum()
        assert (seen & objects).sum() < 0.01 * objects.sum()

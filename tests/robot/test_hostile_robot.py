"""URDFs and meshes that are damaged or hostile: each is refused with its reason, and costs the node little."""

import base64
import io
import json
import logging
import re
import struct
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from scipy.spatial import ConvexHull

from sam3_node.errors import CalibrationError, SettingsError
from sam3_node.geometry import Array, rigid, rotation_from_vector
from sam3_node.robot import mesh_reader, meshes, robot_model
from sam3_node.robot.body import Pixels, RobotBody
from sam3_node.robot.hulls import MAX_CORNERS, thin_hull
from sam3_node.robot.lens_view import NEAR_M, LensView
from sam3_node.types import Intrinsics
from tests.support.hostility import limited_memory, link_to_device, make_huge, make_pipe
from tests.support.refuses import refuses
from tests.support.resources import nothing_added
from tests.support.tables import each_row

trimesh = pytest.importorskip("trimesh", reason="needs the extra robot")
pytest.importorskip("yourdfpy", reason="needs the extra robot")

VIEW = LensView(Intrinsics(554.0, 554.0, 319.5, 239.5), (480, 640))
BALL = '<collision><geometry><sphere radius="0.1"/></geometry></collision>'
MEGABYTE = 1 << 20
LINE_PX = 2
"""Pixels along an outline of 60 pixels or more that the rounding of OpenCV's lines may move."""


def make_links(*names: str) -> str:
    return "".join(f'<link name="{name}">{BALL}</link>' for name in names)


def make_joint(name: str, parent: str, child: str, kind: str = "fixed", more: str = "") -> str:
    return (
        f'<joint name="{name}" type="{kind}"><parent link="{parent}"/><child link="{child}"/>{more}</joint>'
    )


def write_urdf(folder: Path, *elements: str) -> Path:
    path = folder / "arm.urdf"
    path.write_text(f'<robot name="arm">{"".join(elements)}</robot>')
    return path


def write_meshes(folder: Path, *names: str, scale: str = "1 1 1") -> Path:
    """Write a URDF of one link that has these meshes."""
    shapes = [
        f'<visual><geometry><mesh filename="{name}" scale="{scale}"/></geometry></visual>' for name in names
    ]
    return write_urdf(folder, f'<link name="hand">{"".join(shapes)}</link>')


def write_stl(path: Path, triangles: int) -> None:
    path.write_bytes(bytes(80) + struct.pack("<I", triangles) + bytes(50 * triangles))


def spread(count: int, size: tuple[float, float, float]) -> Array:
    """Return the corners of a hull, on an ellipsoid with these half axes."""
    points = np.random.default_rng(3).normal(size=(count, 3))
    corners: Array = points / np.linalg.norm(points, axis=1, keepdims=True) * size
    return corners


@each_row(
    ("elements", "named"),
    [
        ((make_links("a", "b"), make_joint("up", "a", "b"), make_joint("down", "b", "a")), ("up", "down")),
        (
            (
                make_links("root", "a", "b", "c"),
                make_joint("one", "a", "b"),
                make_joint("two", "b", "c"),
                make_joint("three", "c", "a"),
            ),
            ("one", "two", "three"),
        ),
        ((make_links("a", "b"), make_joint("loop", "b", "b"), make_joint("up", "a", "b")), ("up", "loop")),
        ((make_links("a", "b"), make_joint("loop", "b", "b")), ("circle", "loop")),
        (
            (make_links("a", "b", "c"), make_joint("left", "a", "c"), make_joint("right", "b", "c")),
            ("left", "right"),
        ),
        ((make_links("a", "b", "c"), make_joint("up", "a", "b")), ("a, c", "fixed")),
        ((make_links("a"), make_joint("up", "a", "ghost")), ("up", "ghost")),
        ((make_links("a"), make_joint("up", "ghost", "a")), ("up", "ghost")),
        ((make_links("a", "a"),), ("once", "a")),
        (
            (make_links("a", "b", "c"), make_joint("up", "a", "b"), make_joint("up", "b", "c")),
            ("once", "up"),
        ),
        (
            (make_links("a", "b"), make_joint("up", "a", "b", "revolute", '<axis xyz="0 0 0"/>')),
            ("up", "axis"),
        ),
        (
            (make_links("a", "b"), make_joint("up", "a", "b", more='<origin xyz="nan 0 0"/>')),
            ("up", "finite"),
        ),
        (
            (
                make_links("a", "b"),
                make_joint("up", "a", "b", "revolute", '<mimic joint="x" multiplier="inf"/>'),
            ),
            ("up", "finite"),
        ),
        (('<link name="a"><visual><geometry><sphere radius="1e300"/></geometry></visual></link>',), "link a"),
        (('<link name="a"><visual><geometry><sphere radius="nan"/></geometry></visual></link>',), "link a"),
    ],
)
def test_what_is_no_tree_of_finite_numbers_is_named(
    tmp_path: Path, elements: tuple[str, ...], named: str | tuple[str, ...]
) -> None:
    path = write_urdf(tmp_path, *elements)
    with limited_memory(8), refuses(SettingsError, field=named):
        RobotBody(path)


def test_a_urdf_of_very_many_links_is_refused(tmp_path: Path) -> None:
    names = [f"l{index}" for index in range(10_000)]
    joints = [make_joint(f"j{name}", "l0", name) for name in names[1:]]
    path = write_urdf(tmp_path, *(f'<link name="{name}"/>' for name in names), *joints)
    with limited_memory(64), refuses(SettingsError, field=(str(robot_model.MAX_LINKS), "10000")):
        RobotBody(path)


def test_a_urdf_of_very_many_geometries_is_refused(tmp_path: Path) -> None:
    path = write_urdf(tmp_path, f'<link name="a">{BALL * (robot_model.MAX_PARTS + 1)}</link>')
    with limited_memory(64), refuses(SettingsError, field=(str(robot_model.MAX_PARTS), "geometries")):
        RobotBody(path)


def test_a_long_chain_of_links_is_a_robot(tmp_path: Path) -> None:
    names = [f"l{index}" for index in range(robot_model.MAX_LINKS)]
    joints = [
        make_joint(f"j{child}", parent, child, more='<origin xyz="0 0 0.01"/>')
        for parent, child in pairwise(names)
    ]
    # the joints of the far end come first
    body = RobotBody(
        write_urdf(
            tmp_path, make_links("l0"), *(f'<link name="{name}"/>' for name in names[1:]), *joints[::-1]
        )
    )
    assert body.place({})[-1, 2, 3] == pytest.approx(0.01 * (robot_model.MAX_LINKS - 1))


@pytest.mark.parametrize("make", [make_pipe, link_to_device, make_huge])
def test_a_urdf_that_is_no_file_of_a_sane_size_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "arm.urdf"
    make(path)
    with limited_memory(8), refuses(SettingsError, field=(str(path), "expected a")):
        RobotBody(path)


@pytest.mark.parametrize("make", [make_pipe, link_to_device, make_huge])
def test_a_mesh_that_is_no_file_of_a_sane_size_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "hand.stl")
    with limited_memory(8), refuses(SettingsError, field="hand.stl"):
        RobotBody(write_meshes(tmp_path, "hand.stl"))


def test_a_mesh_of_a_million_triangles_is_refused_unread(tmp_path: Path) -> None:
    write_stl(tmp_path / "hand.stl", 1_000_000)
    with limited_memory(8), refuses(SettingsError, field=("hand.stl", str(mesh_reader.MAX_MESH_BYTES))):
        RobotBody(write_meshes(tmp_path, "hand.stl"))


def test_a_mesh_of_too_many_triangles_is_refused(tmp_path: Path) -> None:
    write_stl(tmp_path / "hand.stl", mesh_reader.MAX_TRIANGLES + 1)
    with limited_memory(64), refuses(SettingsError, field=("hand.stl", str(mesh_reader.MAX_TRIANGLES))):
        RobotBody(write_meshes(tmp_path, "hand.stl"))


def test_too_many_bytes_of_meshes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "MAX_MESHES_BYTES", 1000)
    for name in ("a.stl", "b.stl"):
        write_stl(tmp_path / name, 12)
    with refuses(SettingsError, field=("1000", "1368")):
        RobotBody(write_meshes(tmp_path, "a.stl", "b.stl"))


def pack(name: str) -> bytes:
    """Return an archive with one member, 64 MiB of zeros."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, bytes(64 * MEGABYTE))
    return archive.getvalue()


@pytest.mark.parametrize("name", ["hand.zip", "hand.3mf", "hand.zae", "hand.3dxml", "hand.dae", "hand.STL"])
def test_an_archive_is_not_unpacked(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pack("hand.dae"))
    with limited_memory(8), refuses(SettingsError, field=(name, "convert it")):
        RobotBody(write_meshes(tmp_path, name))


def double_often() -> bytes:
    """Return a COLLADA file whose last node has 2 to the 30 balls."""
    text: str = trimesh.creation.icosphere(5).export(file_type="dae").decode()
    drawn = re.search(r"<instance_geometry.*</instance_geometry>", text, re.DOTALL)
    assert drawn is not None
    nodes = [f'<node id="n0">{drawn[0]}</node>']
    nodes += [
        f'<node id="n{index}">{2 * f"""<instance_node url="#n{index - 1}"/>"""}</node>'
        for index in range(1, 31)
    ]
    library = f"<library_nodes>{''.join(nodes)}</library_nodes>"
    changed = text.replace(drawn[0], '<instance_node url="#n30"/>')
    return changed.replace("<library_visual_scenes", f"{library}<library_visual_scenes").encode()


def declare_zeros() -> bytes:
    """Return a glTF that declares eight billion corners without data."""
    accessor = {"componentType": 5126, "count": 8 * 10**9, "type": "VEC3"}
    text = base64.b64encode(bytes(4)).decode()
    tree = {
        "asset": {"version": "2.0"},
        "buffers": [{"byteLength": 4, "uri": f"data:application/octet-stream;base64,{text}"}],
        "bufferViews": [{"buffer": 0, "byteLength": 4}],
        "accessors": [accessor],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}],
        "nodes": [{"mesh": 0}],
        "scenes": [{"nodes": [0]}],
    }
    return json.dumps(tree).encode()


@pytest.mark.parametrize(("name", "make"), [("hand.dae", double_often), ("hand.gltf", declare_zeros)])
def test_a_small_mesh_that_grows_is_refused(tmp_path: Path, name: str, make: Callable[[], bytes]) -> None:
    (tmp_path / name).write_bytes(make())
    with (
        nothing_added(),
        limited_memory(8),
        refuses(SettingsError, field=(name, str(mesh_reader.MAX_MEMORY_BYTES // MEGABYTE))),
    ):
        RobotBody(write_meshes(tmp_path, name))


def test_a_mesh_that_ends_its_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes.sys, "executable", "/bin/false")
    trimesh.creation.box().export(tmp_path / "hand.stl")
    with refuses(SettingsError, field=("hand.stl", "ended its process")):
        RobotBody(write_meshes(tmp_path, "hand.stl"))


def test_a_mesh_reads_no_pipe_beside_it(tmp_path: Path) -> None:
    scene = trimesh.Scene(trimesh.creation.box())
    files = scene.export(file_type="gltf")
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    path = write_meshes(tmp_path, "model.gltf")
    assert RobotBody(path).place({}).shape == (1, 4, 4)
    buffer = tmp_path / next(name for name in files if name.endswith(".bin"))
    buffer.unlink()
    make_pipe(buffer)
    with refuses(SettingsError, field=("model.gltf", "a pipe")):
        RobotBody(path)
    model = tmp_path / "model.gltf"
    model.write_text(model.read_text().replace(buffer.name, f"../{buffer.name}"))
    with refuses(SettingsError, field=("model.gltf", f"../{buffer.name}")):
        RobotBody(path)


@pytest.mark.verifies(
    "robot",
    "meshes: STL, OBJ, PLY, glTF, Collada with its unit",
    "other implementation",
    "trimesh writes them",
    "meshes of a robot's maker",
)
@pytest.mark.parametrize("kind", ["stl", "obj", "dae", "ply", "glb"])
def test_the_formats_of_meshes_give_the_same_hull(tmp_path: Path, kind: str) -> None:
    trimesh.creation.cone(radius=60, height=300, sections=5).export(tmp_path / f"hand.{kind}")
    body = RobotBody(write_meshes(tmp_path, f"hand.{kind}", scale="0.001 0.002 -0.001"))
    (part,) = body._parts
    assert part.corners.max(axis=0) == pytest.approx([0.06, 0.12 * np.sin(0.4 * np.pi), 0.0], abs=1e-6)
    assert part.corners.min(axis=0)[2] == pytest.approx(-0.3)
    # a pyramid with five sides, and the two diagonals of its base
    assert (len(part.corners), len(part.edges)) == (6, 12)


def outline_of(corners: Array) -> Pixels:
    hull = trimesh.convex.convex_hull(corners)
    body = robot_model.Part.from_corners(0, np.asarray(hull.vertices), np.eye(4))
    (outline,) = VIEW.outlines(body.corners, np.array([0]), [body.edges])
    drawn = np.zeros(VIEW.size, np.uint8)
    if outline is not None:
        cv2.fillPoly(drawn, [outline], 1, shift=4)
    return drawn > 0


@pytest.mark.parametrize("size", [(0.1, 0.1, 0.1), (0.05, 0.07, 0.4), (0.2, 0.2, 0.001)])
@pytest.mark.parametrize("count", [300, 8000])
def test_a_thinned_hull_is_around_the_whole_one(count: int, size: tuple[float, float, float]) -> None:
    corners = np.asarray(trimesh.convex.convex_hull(spread(count, size)).vertices)
    thin = thin_hull(corners)
    assert len(thin.corners) <= MAX_CORNERS
    faces = trimesh.convex.convex_hull(thin.corners)
    outside = corners @ faces.face_normals.T - np.sum(faces.face_normals * faces.triangles[:, 0], axis=1)
    assert outside.max() < 1e-9
    # the error that is told is true, and small
    whole = trimesh.convex.convex_hull(corners)
    error_m = trimesh.proximity.closest_point(whole, thin.corners)[1].max()
    assert error_m < thin.bound_error() + 1e-9 < 0.03 * max(size)
    turned = rigid(rotation_from_vector((0.3, 1.1, 0.4)), (0, 0, 0.8))
    old = outline_of(trimesh.transform_points(corners, turned))
    new = outline_of(trimesh.transform_points(thin.corners, turned))
    assert (old & ~cv2.dilate(new.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool)).sum() == 0
    assert (old & new).sum() > 0.93 * (old | new).sum()


@each_row("turn", [(0.0, 0.0, 0.0), (0.4, 1.1, 0.2)])
@each_row("noise_m", [0.0, 1e-17, 1e-15, 1e-13])
def test_a_flat_hull_is_thinned_in_its_plane(turn: tuple[float, float, float], noise_m: float) -> None:
    around = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    disc = np.column_stack([0.1 * np.cos(around), 0.04 * np.sin(around), np.zeros(400)])
    disc += np.random.default_rng(5).normal(size=disc.shape) * noise_m
    corners = disc @ rotation_from_vector(turn).T
    thin = thin_hull(corners)
    assert len(thin.corners) <= MAX_CORNERS
    assert 1.0 < thin.growth < 1.01
    # around the whole, in its plane
    flat = thin.corners @ rotation_from_vector(turn)
    assert np.abs(flat[:, 2]).max() < 1e-9
    outline = ConvexHull(flat[:, :2])
    assert (disc[:, :2] @ outline.equations[:, :2].T + outline.equations[:, 2]).max() < 1e-9


def test_a_flat_mesh_of_many_corners_is_read(tmp_path: Path) -> None:
    disc = trimesh.creation.cylinder(radius=60, height=0, sections=400)
    disc.export(tmp_path / "disc.stl")
    body = RobotBody(write_meshes(tmp_path, "disc.stl", scale="0.001 0.001 0.001"))
    (part,) = body._parts
    assert part.corners.max(axis=0) == pytest.approx([0.06, 0.06, 0.0], rel=0.01)
    assert len(part.corners) <= MAX_CORNERS


def test_a_hull_of_few_corners_stays_as_it_is() -> None:
    corners = spread(MAX_CORNERS, (0.1, 0.2, 0.3))
    thin = thin_hull(corners)
    assert np.array_equal(thin.corners, corners)
    assert (thin.growth, thin.bound_error()) == (1.0, 0.0)


def test_the_log_tells_the_error_of_a_thinned_hull(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ball = trimesh.convex.convex_hull(spread(20_000, (100, 100, 100)))
    ball.export(tmp_path / "ball.stl")
    with caplog.at_level(logging.INFO):
        body = RobotBody(write_meshes(tmp_path, "ball.stl", scale="0.001 0.001 0.001"))
    assert len(body._corners) <= MAX_CORNERS
    (message,) = (record.getMessage() for record in caplog.records if record.name == robot_model.__name__)
    told = re.search(r"([0-9.]+) mm, of hand", message)
    assert told is not None
    assert 0.5 < float(told[1]) < 4


@each_row("seed", range(8))
def test_the_cut_at_the_camera_is_that_between_all_corners(seed: int) -> None:
    random = np.random.default_rng(seed)
    corners = spread(40, (0.2, 0.1, 0.3)) @ rotation_from_vector(random.normal(size=3)).T
    corners += random.uniform((-0.05, -0.05, -0.05), (0.05, 0.05, 0.1))
    front = corners[corners[:, 2] >= NEAR_M]
    back = corners[corners[:, 2] < NEAR_M]
    assert len(front)
    assert len(back)
    pairs = [near + (near[2] - NEAR_M) / (near[2] - far[2]) * (far - near) for near in front for far in back]
    expected = outline_of(np.concatenate([front, pairs]))
    assert (expected != outline_of(corners)).sum() <= LINE_PX * max(VIEW.size)
    assert expected.any()


def test_a_thin_body_that_leaves_the_image_is_drawn_as_it_is() -> None:
    """OpenCV's own intersection gave the whole image, or nothing, in more than half of these places."""
    random = np.random.default_rng(5)
    rod = np.asarray(trimesh.creation.cylinder(0.01, 2.0, sections=250).vertices)
    rows, columns = np.mgrid[: VIEW.size[0] : 4, : VIEW.size[1] : 4]
    lens = VIEW.intrinsics
    rays = np.stack([(columns - lens.cx) / lens.fx, (rows - lens.cy) / lens.fy], axis=-1)
    for _ in range(20):
        turn = rotation_from_vector(random.normal(size=3) * (1, 1, 0) + (1.5, 0, 0))
        corners = rod @ turn.T + random.uniform((-0.3, -0.3, 2.2), (0.3, 0.3, 2.6))
        hull = ConvexHull(corners[:, :2] / corners[:, 2:])
        beyond_px = lens.fx * (rays @ hull.equations[:, :2].T + hull.equations[:, 2]).max(axis=-1)
        drawn = outline_of(corners)[::4, ::4]
        assert not (drawn & (beyond_px > 2)).any()
        assert not (~drawn & (beyond_px < -2)).any()


def test_a_mesh_of_many_corners_at_the_camera_costs_little(tmp_path: Path) -> None:
    trimesh.convex.convex_hull(spread(8000, (0.3, 0.3, 0.3))).export(tmp_path / "ball.stl")
    body = RobotBody(write_meshes(tmp_path, "ball.stl"))
    with limited_memory(4):
        drawn = body.draw(body.place({}), VIEW)
    assert drawn.all()


@each_row("position", [1e7, -1e300, float("inf"), float("nan")])
@each_row("kind", ["prismatic", "revolute"])
def test_positions_that_lead_nowhere_are_refused(tmp_path: Path, kind: str, position: float) -> None:
    more = '<axis xyz="1 0 0"/><origin xyz="0 0 1"/>'
    body = RobotBody(write_urdf(tmp_path, make_links("a", "b"), make_joint("up", "a", "b", kind, more)))
    if kind == "prismatic" or not np.isfinite(position):
        with refuses(CalibrationError, field="1e+06"):
            body.place({"up": position})
    # the farthest that is allowed is drawn, somewhere else
    drawn = body.draw(body.place({"up": 1e6}), VIEW)
    assert drawn.shape == VIEW.size


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    write_stl(tmp_path / "flat.stl", 12)
    (tmp_path / "hand.gltf").write_bytes(declare_zeros())
    with nothing_added():
        for name in ("flat.stl", "hand.gltf"):
            with pytest.raises(SettingsError):
                RobotBody(write_meshes(tmp_path, name))

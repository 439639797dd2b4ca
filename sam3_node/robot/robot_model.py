"""Read a robot's URDF: its tree of links and joints, and the convex bodies that are fixed to the links.

A URDF may be damaged or hostile. So its size is bounded, the graph of its links is checked before anything walks it,
and its meshes are read by `meshes`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import MissingExtraError, SettingsError, require
from ..files import check_regular, explain_os_error
from ..geometry import Array, transform_points
from .hulls import MAX_CORNERS
from .mesh_files import find_mesh
from .meshes import read_hulls
from .urdf_text import check_text

_log = logging.getLogger(__name__)

MAX_URDF_BYTES = 2 << 20
"""Size of a URDF file. A larger one is refused before it is read."""
MAX_LINKS = 1000
"""Links of a robot. A URDF with more is refused."""
MAX_PARTS = 500
"""Convex bodies of a robot, each drawn at each frame. A URDF with more is refused."""
MAX_REACH_M = 1e6
"""Distance of a body from its link, or of a link from the base, in metres. A larger one is refused: pixels overflow."""
PLANES = 0.5
"""Faces whose normals agree when rounded to this step are one plane, around the whole hull."""
MOVING = ("revolute", "continuous", "prismatic")
"""Types of a URDF's joints that have a position."""
FREE = ("floating", "planar")
"""Types of a URDF's joints whose place no joint state tells."""
_SHOWN = 40
"""Names of links or joints that a message lists. A URDF may have a thousand."""


class Part(NamedTuple):
    """A convex body that is fixed to a link, in the link's frame."""

    link: int
    corners: Array
    """[n, 3], metres"""
    edges: npt.NDArray[np.int64]
    """[m, 2]: the corners at the ends of each edge"""
    normals: Array
    """[f, 3], outward"""
    offsets: Array
    """[f]: the body is where normals @ point <= offsets"""

    @classmethod
    def from_corners(cls, link: int, corners: Array, link_from_mesh: Array) -> Part:
        """Return the convex hull of points [n, 3]."""
        hull = require("trimesh.convex", "robot").convex_hull(corners)
        placed = transform_points(link_from_mesh, hull.vertices)
        faces = np.asarray(hull.face_normals) @ link_from_mesh[:3, :3].T
        # each measured point is compared with each plane, so nearly parallel faces share one
        _, group = np.unique(np.round(faces / PLANES), axis=0, return_inverse=True)
        sums = np.zeros((group.max() + 1, 3))
        np.add.at(sums, group.ravel(), faces * np.asarray(hull.area_faces)[:, None])
        normals = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
        return cls(link, placed, np.asarray(hull.edges_unique), normals, (placed @ normals.T).max(axis=0))


class RobotModel(NamedTuple):
    """What a URDF says about a robot."""

    links: list[str]
    """names, the root first"""
    joints: list[Any]
    """of yourdfpy, each after the joint of its parent; the joint at `index` moves the link at `index + 1`"""
    parts: list[Part]


def read_robot(path: Path) -> RobotModel:
    """Return the tree and the convex bodies of a URDF.

    A link has the parts of its collision geometry, else of its visual geometry. Raises SettingsError for a file that is
    not a URDF with a body, and MissingExtraError without the extra `robot`.
    """
    with _explaining(path):
        robot = _parse(path)
        root, joints = _sort_joints(path, robot)
        links = [root, *(joint.child for joint in joints)]
        named = {link.name: link for link in robot.links}
        parts = _load_parts(path, [named[name] for name in links])
    if not parts:
        raise SettingsError(
            f"robot.urdf: expected links with collision or visual geometry, found none in {path}"
        )
    return RobotModel(links, joints, parts)


def read_joint_names(path: Path) -> frozenset[str]:
    """Return the names of all joints of a URDF, without its meshes. Raises the errors of `read_robot`."""
    with _explaining(path):
        _, joints = _sort_joints(path, _parse(path))
        return frozenset(joint.name for joint in joints)


def _parse(path: Path) -> Any:
    """Return yourdfpy's robot of a file, without its meshes."""
    yourdfpy = require("yourdfpy", "robot")
    check_file(path)
    return yourdfpy.URDF.load(str(path), build_scene_graph=False, load_meshes=False).robot


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Raise SettingsError for whatever is wrong with the file in the block."""
    try:
        yield
    # what is wrong with the graph or a mesh, and an absent extra, are explained already
    except (SettingsError, MissingExtraError):
        raise
    except Exception as error:  # yourdfpy raises errors of many kinds
        raise SettingsError(f"robot.urdf: cannot read {path}: {error!r:.300}") from error


def check_file(path: Path) -> None:
    """Raise SettingsError for a file that cannot be read or has no URDF. Needs lxml of the extra `robot` alone."""
    with explain_os_error(SettingsError, f"robot.urdf: cannot read {path}"):
        check_regular(path, MAX_URDF_BYTES)
        check_text(path, path.read_bytes())


def origin_of(element: Any) -> Array:
    """Return the pose of a joint, or of the geometry of a link, in its link. It is the identity if none is given."""
    return np.eye(4) if element.origin is None else np.asarray(element.origin)


def _sort_joints(path: Path, robot: Any) -> tuple[str, list[Any]]:
    """Return the root link, and the joints, a parent's before its children's.

    Raises SettingsError unless links and joints are a tree, with finite numbers.
    """
    links = [link.name for link in robot.links]
    if len(links) > MAX_LINKS:
        raise SettingsError(f"robot.urdf: expected at most {MAX_LINKS} links in {path}, found {len(links)}")
    for kind, names in (("link", links), ("joint", [joint.name for joint in robot.joints])):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise SettingsError(
                f"robot.urdf: expected each {kind} once in {path}, found {list_names(repeated)} more often; rename them"
            )

    # each joint belongs to two links, and each link has one joint above it at most
    above: dict[str, Any] = {}
    below: dict[str, list[Any]] = {name: [] for name in links}
    for joint in robot.joints:
        where = f"robot.urdf: joint {joint.name:.200} of {path}"
        for link in (joint.parent, joint.child):
            if link not in below:
                raise SettingsError(f"{where}: expected links of the same file, found {link:.200}; add it")
        if joint.child in above:
            raise SettingsError(
                f"{where}: expected the child of no other joint, found {joint.child}, the child of "
                f"{above[joint.child].name}, too; remove one of the joints"
            )
        _check_numbers(where, joint)
        above[joint.child] = joint
        below[joint.parent].append(joint)
    _check_mimics(path, robot.joints)

    circle = _find_circle(above)
    if circle:
        raise SettingsError(
            f"robot.urdf: expected a tree of links in {path}, found a circle of the joints {list_names(circle)}; "
            "remove one of them"
        )
    roots = [name for name in links if name not in above]
    if len(roots) != 1:
        raise SettingsError(
            f"robot.urdf: expected one link in {path} that is no joint's child, found {list_names(roots) or 'none'}; "
            "connect the links by fixed joints"
        )

    # a tree: each link is met once
    joints: list[Any] = []
    waiting = [roots[0]]
    while waiting:
        found = below[waiting.pop(0)]
        joints += found
        waiting += [joint.child for joint in found]
    return roots[0], joints


def _check_numbers(where: str, joint: Any) -> None:
    """Raise SettingsError for a joint with numbers that cannot place a link."""
    numbers = [origin_of(joint), joint.axis]
    if joint.mimic is not None:
        numbers.append(np.array([joint.mimic.multiplier, joint.mimic.offset], float))
    if not all(np.isfinite(part).all() for part in numbers):
        raise SettingsError(f"{where}: expected finite numbers in origin, axis and mimic, found others")
    # the axis of a fixed joint may be zero
    if joint.type in MOVING and not np.any(joint.axis):
        raise SettingsError(f"{where}: expected an axis that is not zero, found {joint.axis.tolist()}")
    types = (*MOVING, *FREE, "fixed")
    if joint.type not in types:
        raise SettingsError(f"{where}: expected a type, one of {', '.join(types)}, found {joint.type!r:.80}")


def _check_mimics(path: Path, joints: Sequence[Any]) -> None:
    """Raise SettingsError for a joint that mimics a joint that is not there or has no position, or itself."""
    named = {joint.name: joint for joint in joints}
    for joint in joints:
        followed = [joint.name]
        leader = joint
        while leader.mimic is not None:
            where = f"robot.urdf: joint {leader.name:.200} of {path}"
            name = leader.mimic.joint
            if name not in named:
                raise SettingsError(
                    f"{where}: expected it to mimic a joint of the same file, found {name!r:.200}; correct the name"
                )
            if name in followed:
                raise SettingsError(
                    f"{where}: expected it to mimic a joint that has a position of its own, found a circle of "
                    f"{list_names(followed)}; remove one mimic"
                )
            leader = named[name]
            if leader.type in FREE:
                raise SettingsError(
                    f"{where}: expected it to mimic a joint that has a position, found {name:.200}, which is "
                    f"{leader.type}"
                )
            followed.append(name)


def _find_circle(above: Mapping[str, Any]) -> list[str]:
    """Return the names of joints that lead from a link to itself; none if there is no circle.

    `above` has the joint above each link.
    """
    cleared: set[str] = set()
    for start in above:
        climbed: dict[str, str] = {}
        link = start
        # the way up ends at a root, at a link whose way up is known, or at a link that it has passed
        while link in above and link not in cleared and link not in climbed:
            climbed[link] = above[link].name
            link = above[link].parent
        if link in climbed:
            passed = list(climbed)
            return list(climbed.values())[passed.index(link) :]
        cleared.update(climbed)
    return []


def list_names(names: Sequence[str]) -> str:
    """Return names for a message, the first of many."""
    shown = ", ".join(f"{name:.80}" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _load_parts(path: Path, links: Sequence[Any]) -> list[Part]:
    """Return the convex bodies of links, in their order."""
    shapes = [(index, shape) for index, link in enumerate(links) for shape in link.collisions or link.visuals]
    if len(shapes) > MAX_PARTS:
        raise SettingsError(
            f"robot.urdf: expected at most {MAX_PARTS} geometries in {path}, found {len(shapes)}; join some of them"
        )
    files = []
    for _, shape in shapes:
        mesh = shape.geometry.mesh
        files.append(None if mesh is None else find_mesh(path, mesh.filename))
    hulls = read_hulls([file for file in files if file is not None])
    parts = []
    thinned_m: dict[str, float] = {}
    for (index, shape), file in zip(shapes, files, strict=True):
        name = links[index].name
        if file is None:
            corners = _make_primitive(shape.geometry)
        else:
            hull = hulls[file].scale(1.0 if shape.geometry.mesh.scale is None else shape.geometry.mesh.scale)
            corners = hull.corners
            if hull.growth > 1:
                thinned_m[name] = max(hull.bound_error(), thinned_m.get(name, 0.0))
        link_from_mesh = origin_of(shape)
        # also false for what is not a number
        if not (np.abs(corners).max() <= MAX_REACH_M and np.abs(link_from_mesh).max() <= MAX_REACH_M):
            raise SettingsError(
                f"robot.urdf: link {name} of {path}: expected geometry within {MAX_REACH_M:g} m of its link, "
                "found some beyond"
            )
        parts.append(Part.from_corners(index, corners, link_from_mesh))
    if thinned_m:
        worst = max(thinned_m, key=thinned_m.__getitem__)
        _log.info(
            "robot.urdf: hulls of more than %d corners are replaced by larger ones, on %d links; the largest error is "
            "%.2f mm, of %s",
            MAX_CORNERS,
            len(thinned_m),
            1000 * thinned_m[worst],
            worst,
        )
    return parts


def _make_primitive(geometry: Any) -> Array:
    """Return the corners of a box, a cylinder or a sphere."""
    creation = require("trimesh.creation", "robot")
    # numbers that are too large are refused afterwards
    with np.errstate(over="ignore", invalid="ignore"):
        if geometry.box is not None:
            mesh = creation.box(geometry.box.size)
        elif geometry.cylinder is not None:
            mesh = creation.cylinder(geometry.cylinder.radius, geometry.cylinder.length)
        else:
            mesh = creation.icosphere(2, geometry.sphere.radius)
    return np.asarray(mesh.vertices)

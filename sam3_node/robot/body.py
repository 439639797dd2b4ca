"""Draw the robot's own pixels in an image, from its URDF and its joints.

`RobotBody` has the convex parts of a URDF, which `robot_model` reads. The silhouette of the robot is the union of the
projected parts: the hull of the projected corners of a convex body is its exact outline. With depth, a pixel is the
robot's only if the measured point lies on a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError, SettingsError
from ..geometry import Array, DepthMap, Float, invert
from .gripper import find_gripper
from .joint_positions import MAX_SHOWN, JointPositions
from .lens_view import SHIFT, LensView
from .robot_model import FREE, MAX_REACH_M, MOVING, Part, list_names, origin_of, read_robot

Pixels = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

STRIDE = 4
"""Distance in pixels of the points whose depth is compared: the others do as their neighbour."""
_AROUND = np.ones((3, 3), np.uint8)
"""Neighbours of a pixel in a dilation: the eight around it."""


class RobotBody:
    """The convex parts of a robot and the joints between its links. `base` names the link of the calibration's base.

    Raises SettingsError for a file that is not a URDF with a body, and MissingExtraError without the extra `robot`.
    """

    def __init__(self, path: Path, base: str = "") -> None:
        model = read_robot(path)
        links = model.links
        joints = model.joints
        self._parts = model.parts
        self.gripper = find_gripper(links, joints)
        """Links of the gripper."""
        if base and base not in links:
            raise SettingsError(
                f"robot.base: expected a link of {path}, one of {list_names(links)}, found {base}"
            )
        # all corners in one array, so that one multiplication places them
        self._corners = np.concatenate([part.corners for part in self._parts])
        counts = [len(part.corners) for part in self._parts]
        self._corner_links = np.repeat([part.link for part in self._parts], counts)
        self._starts = np.append(0, np.cumsum(counts)[:-1])
        self._base = links.index(base) if base else 0
        # the chain of joints, each after its parent
        self._parents = [links.index(joint.parent) for joint in joints]
        self._origins = np.array([origin_of(joint) for joint in joints]).reshape(-1, 4, 4)
        self._positions = JointPositions(joints)
        self.joints = self._positions.names
        """Names of the joints that a joint state gives, along the tree: joints that move and mimic no other."""
        self.known_joints = frozenset(joint.name for joint in joints)
        """Names of all joints of the URDF."""
        self._check_free(path, links, joints)
        # the axis of a fixed joint may be zero
        axes = [
            joint.axis / np.linalg.norm(joint.axis) if joint.type in MOVING else np.zeros(3)
            for joint in joints
        ]
        # either a shift along the axis or a turn about it; the other is zero
        slides = np.array([joint.type == "prismatic" for joint in joints], bool)[:, None]
        self._slides = np.reshape(axes, (-1, 3)) * slides
        self._cross = np.cross(np.eye(3), (np.reshape(axes, (-1, 3)) * ~slides)[:, None])

    def place(self, positions: Mapping[str, float]) -> Array:
        """Return base_from_link [n, 4, 4] at joint positions, radians or metres, as JointPositions reads them.

        Raises CalibrationError if no joint has a position, for positions far beyond the URDF's limits, and for
        positions so large that the robot is nowhere.
        """
        moved = self._positions.read(positions)
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._chain(moved)
        # also false for what is not a number
        if not (np.abs(found) <= MAX_REACH_M).all():
            raise CalibrationError(
                f"expected joint positions in radians and metres that leave the robot within {MAX_REACH_M:g} m, "
                "found larger ones"
            )
        return found

    def describe_lacking(self, positions: Mapping[str, float]) -> str | None:
        """Return which joints have no position and so are drawn at zero; None if each has one."""
        lacking = self._positions.find_lacking(positions)
        if not lacking:
            return None
        return (
            f"joints without a position: expected {list_names(lacking)} of robot.urdf, found "
            f"{list_names(list(positions))} alone, so the others are drawn at 0; send them, too"
        )

    def describe_strangers(self, positions: Mapping[str, float]) -> str | None:
        """Return which positions are of no joint of the URDF; None if each is of one."""
        strangers = self._positions.find_strangers(positions)
        if not strangers:
            return None
        return (
            f"robot.urdf has no joints {list_names(strangers)}, whose positions are not used; it has "
            f"{list_names(self.joints)}"
        )

    def _check_free(self, path: Path, links: Sequence[str], joints: Sequence[Any]) -> None:
        """Raise SettingsError for a body whose place relative to the base no joint state tells."""
        # the links that are joined to each other by joints with positions, by the first of them
        group = [0]
        free = []
        for index, joint in enumerate(joints, 1):
            group.append(index if joint.type in FREE else group[links.index(joint.parent)])
            if joint.type in FREE:
                free.append(joint)
        lost = [part.link for part in self._parts if group[part.link] != group[self._base]]
        if not lost:
            return
        named = ", ".join(f"{joint.name:.80} ({joint.type})" for joint in free[:MAX_SHOWN])
        raise SettingsError(
            f"robot.urdf: expected joints with positions between {links[self._base]} and {links[lost[0]]} of {path}, "
            f"found {named}, whose place no joint state tells; make it fixed, remove what it carries, or name a link "
            "on the robot's side in robot.base"
        )

    def _chain(self, moved: Array) -> Array:
        """Return base_from_link [n, 4, 4] at the position of each joint, whatever it is."""
        angles = moved[:, None, None]
        motion = np.tile(np.eye(4), (len(angles), 1, 1))
        # Rodrigues' formula
        motion[:, :3, :3] += np.sin(angles) * self._cross + (1 - np.cos(angles)) * self._cross @ self._cross
        motion[:, :3, 3] = angles[:, 0] * self._slides
        placed = [np.eye(4)]
        for parent, local in zip(self._parents, self._origins @ motion, strict=True):
            # joints come after their parents, so the parent's pose is known
            placed.append(placed[parent] @ local)
        found: Array = invert(placed[self._base]) @ np.array(placed)
        return found

    def draw(
        self,
        camera_from_link: Array,
        view: LensView,
        depth: DepthMap | None = None,
        margin_m: float = 0.0,
        links: Collection[int] | None = None,
    ) -> Pixels:
        """Return the pixels of the robot in a view, bool [height, width]; of some of its links, if they are given.

        With `depth`, of the view's size, only those whose measured point is less than `margin_m` outside of a part, and
        those without a measured depth.
        """
        # every corner in the camera
        drawn = np.zeros(view.size, np.uint8)
        poses = camera_from_link[self._corner_links]
        corners = np.einsum("nij,nj->ni", poses[:, :3, :3], self._corners) + poses[:, :3, 3]
        outlines = view.outlines(corners, self._starts, [part.edges for part in self._parts])
        measured = None if depth is None else _thin(depth)
        for part, outline in zip(self._parts, outlines, strict=True):
            if outline is None or (links is not None and part.link not in links):
                continue
            if measured is None:
                cv2.fillPoly(drawn, [outline], 1, shift=SHIFT)
                continue
            # a box whose sides fit the thinned points
            x, y, width, height = cv2.boundingRect(outline >> SHIFT)
            left = max(x, 0) // STRIDE * STRIDE
            top = max(y, 0) // STRIDE * STRIDE
            box = np.s_[top : max(y + height + 1, 0), left : max(x + width + 1, 0)]
            shape = np.zeros_like(drawn[box])
            if shape.size:
                cv2.fillPoly(shape, [outline - (np.array([left, top]) << SHIFT)], 1, shift=SHIFT)
                points = measured[:, top // STRIDE :, left // STRIDE :]
                drawn[box] |= shape & ~_find_outside(
                    part, camera_from_link[part.link], shape, points, margin_m
                )
        return drawn.view(np.bool_)


def _thin(depth: DepthMap) -> Float:
    """Return every STRIDE-th point of a depth image [4, h, w]: x, y, z and 1 in the camera, 0 where it is unknown."""
    z = depth.image[::STRIDE, ::STRIDE] * np.float32(depth.scale_m)
    x, y = depth.rays[:, ::STRIDE, ::STRIDE] * z
    return np.stack([x, y, z, z > 0])


def _find_outside(part: Part, camera_from_link: Array, shape: Bytes, points: Float, margin_m: float) -> Bytes:
    """Return 1 for the pixels of a part's shape whose point is not on the part, and 0 for others, uint8.

    `points` come from `_thin`, from the corner of the shape on.
    """
    inside = shape[::STRIDE, ::STRIDE]
    row, column = inside.nonzero()
    normals = part.normals @ camera_from_link[:3, :3].T
    planes = np.column_stack([normals, -part.offsets - margin_m - normals @ camera_from_link[:3, 3]])
    above = planes.astype(np.float32) @ points[:, row, column]
    outside = np.zeros_like(inside)
    outside[row, column] = above.max(axis=0, initial=-1.0) > 0
    # at the edge of the shape, pixels do as the points beside them
    outside = np.where(inside, outside, cv2.dilate(outside, _AROUND))
    high, wide = shape.shape
    return outside.repeat(STRIDE, axis=0).repeat(STRIDE, axis=1)[:high, :wide]

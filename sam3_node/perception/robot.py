"""Draw the robot's own pixels in an image, from its URDF and its joints.

`RobotBody` has the convex parts of a URDF, which `robot_model` reads. The silhouette of the robot is the union of the
projected parts: the hull of the projected corners of a convex body is its exact outline. With depth, a pixel is the
robot's only if the measured point lies on a part. `RobotPixels` are the robot on one frame: they say which
objects and detections it covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError, SettingsError
from ..geometry import Array, deproject, invert, project, vector_from_rotation
from ..types import Intrinsics, JointState, Mask
from .joint_positions import MAX_SHOWN, JointPositions
from .robot_model import FREE, MAX_REACH_M, MOVING, Part, list_names, origin_of, read_robot
from .surfaces import DepthMap, Float

Pixels = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
T = TypeVar("T", bound=np.generic)

NEAR_M = 0.02
"""Parts are cut off at this distance in front of the camera."""
STRIDE = 4
"""Distance in pixels of the points whose depth is compared: the others do as their neighbour."""
EDGE_POINTS = 12
"""Points of each edge of an outline that a lens bends."""
COVERED = 0.5
"""Share of an object's last place from which it is hidden, and of a detection's box from which it is dropped."""
MOVED_M = 0.02
"""Metres. A camera that has moved farther looks at another place: what was there may be anywhere in the image."""
MOVED_RAD = math.radians(2)
"""Radians. The same for a camera that has turned farther."""
_AROUND = np.ones((3, 3), np.uint8)
"""Neighbours of a pixel in a dilation: the eight around it."""
_SHIFT = 4
"""Bits of a part of a pixel, in OpenCV's drawing."""


class RobotBody:
    """The convex parts of a robot and the joints between its links. `base` names the link of the calibration's base.

    Raises SettingsError for a file that is not a URDF with a body, and MissingExtraError without the extra `robot`.
    """

    def __init__(self, path: Path, base: str = "") -> None:
        model = read_robot(path)
        links = model.links
        joints = model.joints
        self._parts = model.parts
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
        """Names of the joints that a joint state gives, along the tree: those that move and mimic no other."""
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
        self, camera_from_link: Array, view: LensView, depth: DepthMap | None = None, margin_m: float = 0.0
    ) -> Pixels:
        """Return the pixels of the robot in a view, bool [height, width].

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
            if outline is None:
                continue
            if measured is None:
                cv2.fillPoly(drawn, [outline], 1, shift=_SHIFT)
                continue
            # a box whose sides fit the thinned points
            x, y, width, height = cv2.boundingRect(outline >> _SHIFT)
            left = max(x, 0) // STRIDE * STRIDE
            top = max(y, 0) // STRIDE * STRIDE
            box = np.s_[top : max(y + height + 1, 0), left : max(x + width + 1, 0)]
            shape = np.zeros_like(drawn[box])
            if shape.size:
                cv2.fillPoly(shape, [outline - (np.array([left, top]) << _SHIFT)], 1, shift=_SHIFT)
                points = measured[:, top // STRIDE :, left // STRIDE :]
                drawn[box] |= shape & ~_find_outside(
                    part, camera_from_link[part.link], shape, points, margin_m
                )
        return drawn.view(np.bool_)


class LensView:
    """The projection of a camera onto images of `size` (height, width)."""

    def __init__(self, intrinsics: Intrinsics, size: tuple[int, int]) -> None:
        self.intrinsics = intrinsics
        self.size = size
        height, width = size
        rim = np.array([(x, y) for x in np.linspace(0, width - 1, 9) for y in np.linspace(0, height - 1, 9)])
        rays = deproject(rim, 1.0, intrinsics)[:, :2]
        edge = 0.1 * (rays.max(axis=0) - rays.min(axis=0))
        self._low = rays.min(axis=0) - edge
        self._high = rays.max(axis=0) + edge
        """directions (x / z, y / z) a little beyond the image, where a lens model still holds"""

    def outlines(
        self, points_m: Array, starts: Ints, edges: Sequence[Ints]
    ) -> Iterator[npt.NDArray[np.int32] | None]:
        """Yield the outline [n, 2] of each body, the convex hull of its points, in OpenCV's shifted pixels.

        points_m [n, 3] are in the camera; the bodies begin at `starts`, and have `edges` [m, 2] between their points.
        None for a body that is out of the image.
        """
        z = points_m[:, 2]
        nearest = np.minimum.reduceat(z, starts)
        # a body that comes nearer is cut below; here it must only not divide by zero
        rays = (points_m[:, :2] / np.maximum(z, NEAR_M)[:, None]).astype(np.float32)
        low = np.minimum.reduceat(rays, starts)
        high = np.maximum.reduceat(rays, starts)
        outside = ((high < self._low) | (low > self._high)).any(axis=1)
        across = ((low < self._low) | (high > self._high)).any(axis=1)
        for index, (start, end) in enumerate(pairwise([*starts.tolist(), len(z)])):
            if nearest[index] < NEAR_M:
                yield self._close(_cut_near(points_m[start:end], edges[index]), True)
            else:
                yield None if outside[index] else self._close(rays[start:end], bool(across[index]))

    def _close(self, rays: Float, may_leave: bool) -> npt.NDArray[np.int32] | None:
        if not len(rays):
            return None
        corners = cv2.convexHull(rays).reshape(-1, 2).astype(float)
        # beyond this field a lens model may fold back into the image
        if may_leave:
            corners = _clip(corners, self._low, self._high)
            if not len(corners):
                return None
        lens = self.intrinsics
        if lens.model == "none":
            pixels = corners * (lens.fx, lens.fy) + (lens.cx, lens.cy)
        else:
            # a lens bends straight edges, so points between the corners are projected, too
            steps = np.linspace(0, 1, EDGE_POINTS, endpoint=False)[:, None]
            edges = (corners[:, None] + steps * (np.roll(corners, -1, axis=0) - corners)[:, None]).reshape(
                -1, 2
            )
            pixels = project(np.insert(edges, 2, 1.0, axis=1), lens)
        outline: npt.NDArray[np.int32] = np.rint(pixels * (1 << _SHIFT)).astype(np.int32)
        return outline


def _clip(corners: Array, low: Array, high: Array) -> Array:
    """Return the part of a convex outline [n, 2] between two corners of a box, by Sutherland and Hodgman.

    OpenCV's intersection of convex outlines gives the whole box for some thin outlines of many corners.
    """
    for axis, bound, sign in ((0, low, 1), (0, high, -1), (1, low, 1), (1, high, -1)):
        depth = sign * (corners[:, axis] - bound[axis])
        inside = depth >= 0
        if inside.all():
            continue
        following = np.roll(depth, -1)
        crosses = inside != (following >= 0)
        share = np.zeros(len(corners))
        share[crosses] = depth[crosses] / (depth - following)[crosses]
        met = corners + share[:, None] * (np.roll(corners, -1, axis=0) - corners)
        # each corner that is inside, then the point where the edge after it meets the bound
        corners = np.stack([corners, met], axis=1)[np.column_stack([inside, crosses])]
    return corners


def _cut_near(points_m: Array, edges: Ints) -> Float:
    """Return directions (x / z, y / z) whose hull is the visible part of a convex body, by its edges [m, 2]."""
    ahead = points_m[:, 2] >= NEAR_M
    # where edges meet the plane are the corners of the cut through the body
    crossing = edges[ahead[edges[:, 0]] != ahead[edges[:, 1]]]
    one = points_m[crossing[:, 0]]
    other = points_m[crossing[:, 1]]
    share = (one[:, 2:] - NEAR_M) / (one[:, 2:] - other[:, 2:])
    kept = np.concatenate([points_m[ahead], one + share * (other - one)])
    rays: Float = (kept[:, :2] / kept[:, 2:]).astype(np.float32)
    return rays


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


class Place(NamedTuple):
    """The place where an object was last: what was in view, and what the robot hides of it."""

    mask: Mask
    whole_px: int
    """pixels of the object when the robot was not in front of it"""
    camera_from_base: Array
    """[4, 4], when the object was in view"""


class RobotPixels(NamedTuple):
    """The robot on a frame."""

    joints: JointState
    inside: Pixels
    """[height, width]"""
    camera_from_base: Array
    """[4, 4]"""

    def hides(self, place: Place) -> bool:
        """Return True if the robot is in front of most of a place, at which the camera still looks."""
        if not self.looks_at(place):
            return False
        hidden_px = np.count_nonzero(crop_to(self.inside, place.mask) & place.mask.crop)
        return bool(hidden_px > COVERED * place.mask.area)

    def looks_at(self, place: Place) -> bool:
        """Return True if the camera is where it was when it saw the object there."""
        # a mask in pixels says where the object is only while the camera stands still
        motion = self.camera_from_base @ invert(place.camera_from_base)
        turned_rad = float(np.linalg.norm(vector_from_rotation(motion[:3, :3])))
        return float(np.linalg.norm(motion[:3, 3])) <= MOVED_M and turned_rad <= MOVED_RAD

    def covers(self, box: tuple[float, float, float, float]) -> bool:
        """Return True if the robot fills most of a box (x0, y0, x1, y1) in pixels of the frame."""
        x0, y0, x1, y1 = (max(0, round(side)) for side in box)
        crop = self.inside[y0:y1, x0:x1]
        # a box beside the image has no pixels, and so no mean
        return crop.size > 0 and float(crop.mean()) > COVERED


def crop_to(image: npt.NDArray[T], mask: Mask) -> npt.NDArray[T]:
    """Return the part of an image, which is not copied, in the box of a mask."""
    x0, y0, x1, y1 = mask.box
    return image[y0:y1, x0:x1]

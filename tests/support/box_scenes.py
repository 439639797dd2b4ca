"""Boxes on the table z = 0, seen by a fixed camera, with exact masks and depth, drawn by rays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from sam3_node.calibration import Calibration
from sam3_node.geometry import Array, DepthMap, RayMap
from sam3_node.types import NANOSECONDS, Frame, Instance, Intrinsics, Mask
from sam3_node.wire import encode_depth
from tests.support.calibration_scenes import calibrated

SIZE = (480, 640)
FOCAL_PX = 600.0
EYE_M = np.array([0.0, -0.1, 0.6])
"""Where the camera is, unless a test says otherwise."""
UNIT_M = 0.0001
"""Unit of depth."""


class Block(NamedTuple):
    """A box."""

    middle_m: tuple[float, float, float]
    sides_m: tuple[float, float, float]
    turn: Rotation = Rotation.identity()


class Seen(NamedTuple):
    """A frame with the masks of its boxes, and the calibration of its camera."""

    frame: Frame
    masks: list[Mask]
    camera: Calibration
    points_m: Array
    """[h, w, 3], exact, in the base"""

    def instances(self, **changes: Any) -> list[Instance]:
        """Return sure instances of all boxes, with ids from 1."""
        given: dict[str, Any] = {"confidence": 0.9} | changes
        return [
            Instance(number, f"box {number}", 0.9, "tracked", 5, 0, mask, **given)
            for number, mask in enumerate(self.masks, start=1)
        ]


def see_boxes(
    boxes: Sequence[Block],
    eye_m: Array = EYE_M,
    gaze_m: Sequence[float] = (0.0, 0.0, 0.03),
    noise_m: float = 0.0,
    is_calibrated: bool = True,
) -> Seen:
    """Look at boxes. Without a hand-eye calibration, points are in the camera's frame."""
    ahead = np.array(gaze_m) - eye_m
    ahead /= np.linalg.norm(ahead)
    right = np.cross(ahead, (0, 0, 1))
    right /= np.linalg.norm(right)
    base_from_camera = np.column_stack([right, np.cross(ahead, right), ahead])
    height, width = SIZE
    v, u = np.mgrid[:height, :width]
    rays = np.stack(
        [(u - (width - 1) / 2) / FOCAL_PX, (v - (height - 1) / 2) / FOCAL_PX, np.ones(SIZE)], axis=-1
    )
    ways = rays @ base_from_camera.T
    z = -eye_m[2] / ways[..., 2]
    owner = np.zeros(SIZE, np.int64)
    for number, box in enumerate(boxes, start=1):
        met = _meet(box, eye_m, ways)
        is_nearer = met < z
        z = np.where(is_nearer, met, z)
        owner[is_nearer] = number
    noisy = z + np.random.default_rng(3).normal(0, 1, SIZE) * noise_m
    depth = encode_depth((noisy / UNIT_M).round().astype(np.uint16), "z16", UNIT_M, True)
    frame = Frame("cam0", 7, NANOSECONDS, width, height, "bgr8", b"", depth=depth)
    masks = [Mask.from_full(owner == number) for number in range(1, len(boxes) + 1)]
    camera = calibrated(SIZE, FOCAL_PX, "eye_to_hand")
    quaternion = tuple(Rotation.from_matrix(base_from_camera).as_quat().tolist())
    mount = {"kind": "eye_to_hand", "translation_m": tuple(eye_m), "rotation_quaternion_xyzw": quaternion}
    fields = camera.model_dump(exclude={"hand_eye"}) | ({"hand_eye": mount} if is_calibrated else {})
    return Seen(frame, masks, Calibration.model_validate(fields), eye_m + ways * z[..., None])


def _meet(box: Block, eye_m: Array, ways: Array) -> Array:
    """Return where rays meet a box, as multiples of the ways; infinite where they miss it."""
    half = np.array(box.sides_m) / 2
    start = box.turn.inv().apply(eye_m - box.middle_m)
    enters = np.full(ways.shape[:2], -np.inf)
    leaves = np.full(ways.shape[:2], np.inf)
    for axis in range(3):
        way = ways @ box.turn.as_matrix()[:, axis]
        ends = ((-half[axis] - start[axis]) / way, (half[axis] - start[axis]) / way)
        enters = np.maximum(enters, np.minimum(*ends))
        leaves = np.minimum(leaves, np.maximum(*ends))
    return np.where(enters < leaves, enters, np.inf)


def draw_any_depth(random: np.random.Generator, kind: int, noise_mm: float) -> DepthMap:
    """Return a depth image of a camera of any scale and lens: nothing, one depth, noise, or a slope, by `kind`."""
    size: tuple[int, int] = tuple(random.choice([3, 40, 120], 2).tolist())
    image = np.zeros(size, np.uint16)
    match kind % 4:
        case 1:
            image[:] = random.integers(1, 65535)
        case 2:
            image[:] = random.integers(0, 65535, size)
        case 3:
            image[:] = np.linspace(300, 900, size[0])[:, None] + random.normal(0, noise_mm, size)
    focal_px = float(random.choice([5.0, 600.0]))
    rays = RayMap().rays(Intrinsics(focal_px, focal_px, size[1] / 2, size[0] / 2), size)
    return DepthMap(image, float(random.choice([1e-9, 1e-3, 10.0])), rays, focal_px)

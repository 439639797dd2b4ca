"""Rigid transforms, camera projection and pixel scaling, in numpy. Lenses with distortion also need cv2.

A transform is float64 [4, 4]. Its name is `parent_from_child`, and it maps child coordinates to parent coordinates.
Camera frames follow OpenCV: x right, y down, z forward, in metres.

Intrinsics, `project` and `deproject` use the pixel convention of OpenCV and ROS: (0, 0) is the centre of the top-left
pixel. Points, boxes and `Scaling` measure from the corner of that pixel, so their values are larger by half a pixel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from .types import Clock, FramePose, Image, Intrinsics, Mask

Array = npt.NDArray[np.float64]
Float = npt.NDArray[np.float32]
DepthImage = npt.NDArray[np.uint16]

# when undistortion ends: COUNT + EPS, iterations, normalised image units; OpenCV's default of 5 iterations leaves
# errors of tenths of a pixel at the rim of a strongly distorting lens
_UNDISTORT_CRITERIA = (3, 100, 1e-12)
# sine of half the angle of a turn, below which it is so small that its axis does not follow
_MIN_SINE = 1e-12
_IDENTITY = np.eye(4)


def shrink(image: Image, longest_px: int) -> Image:
    """Return an image whose longer side has at most so many pixels, and each side at least one."""
    import cv2

    scale = longest_px / max(image.shape[:2])
    if scale >= 1:
        return image
    # a frame of a line-scan camera is so flat that its shorter side would vanish
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA), np.uint8)


def rigid(rotation: npt.ArrayLike, translation_m: npt.ArrayLike) -> Array:
    """Return the transform [4, 4] of a rotation matrix [3, 3] and a translation [3]."""
    transform = np.eye(4)
    transform[:3, :3] = rotation
    transform[:3, 3] = translation_m
    return transform


def matrix_of(pose: FramePose) -> Array:
    """Return the transform [4, 4] of a pose."""
    return rigid(rotation_from_quaternion(pose.quaternion_xyzw), pose.position_m)


def pose_of(matrix: Array, frame: str, parent: str, stamp_ns: int, clock: Clock) -> FramePose:
    """Return the pose of `frame` in `parent` that a transform [4, 4] describes."""
    px, py, pz = matrix[:3, 3].tolist()
    x, y, z, w = quaternion_from_rotation(matrix[:3, :3]).tolist()
    return FramePose(frame, parent, stamp_ns, (px, py, pz), (x, y, z, w), clock)


def invert(parent_from_child: Array) -> Array:
    """Return child_from_parent, the inverse of a rigid transform [4, 4], or of each of transforms [..., 4, 4]."""
    # the inverse of a rotation is its transpose
    turned = np.swapaxes(parent_from_child[..., :3, :3], -1, -2)
    inverse = np.zeros(parent_from_child.shape)
    inverse[..., :3, :3] = turned
    inverse[..., :3, 3:] = -turned @ parent_from_child[..., :3, 3:]
    inverse[..., 3, 3] = 1
    return inverse


def transform_points(parent_from_child: Array, points: npt.ArrayLike) -> Array:
    """Return points [..., 3] of the child frame in parent coordinates."""
    return np.asarray(points, np.float64) @ parent_from_child[:3, :3].T + parent_from_child[:3, 3]


def rotation_from_quaternion(quaternion_xyzw: npt.ArrayLike) -> Array:
    """Return the rotation matrix [3, 3] of a quaternion (x, y, z, w), after normalising it."""
    quaternion = np.asarray(quaternion_xyzw, np.float64)
    x, y, z, w = quaternion / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def quaternion_from_rotation(rotation: npt.ArrayLike) -> Array:
    """Return the unit quaternions (x, y, z, w) [..., 4], w >= 0, of rotation matrices [..., 3, 3]."""
    flat = np.asarray(rotation, np.float64).reshape(-1, 9)
    products = (flat @ _QUATERNION_PRODUCTS).reshape(-1, 4, 4) + _IDENTITY
    # row i is 4 * quaternion[i] * quaternion: dividing by the largest component is the well-conditioned choice
    largest = products.diagonal(axis1=1, axis2=2).argmax(axis=1)
    quaternions = products[np.arange(len(flat)), largest]
    quaternions = quaternions / np.sqrt((quaternions * quaternions).sum(axis=1, keepdims=True))
    quaternions = quaternions * np.where(quaternions[:, 3:] < 0, -1.0, 1.0)
    stacked: Array = quaternions.reshape(*np.shape(rotation)[:-2], 4)
    return stacked


def axes_along(direction: Array) -> Array:
    """Return a rotation matrix [3, 3] whose z is a direction [3] of length 1.

    Its y lies as near to the y of the frame as it can, or to x where the direction is near y. So it turns little where
    the direction turns little.
    """
    near = (0.0, 1.0, 0.0) if abs(direction[1]) < 0.9 else (1.0, 0.0, 0.0)
    x = np.cross(near, direction)
    x /= np.linalg.norm(x)
    return np.column_stack([x, np.cross(direction, x), direction])


def compute_ellipsoid(covariance_m2: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the standard deviations along the principal axes of a position's error, and the axes' directions.

    The deviations are three lengths in metres. The directions are a quaternion xyzw that turns the axes into the
    position's frame. `covariance_m2` is xx, xy, xz, yy, yz, zz.
    """
    xx, xy, xz, yy, yz, zz = covariance_m2
    values, axes = np.linalg.eigh(np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]))
    # no quaternion stands for a reflection
    if np.linalg.det(axes) < 0:
        axes[:, 0] *= -1
    return np.sqrt(np.maximum(values, 0.0)).tolist(), quaternion_from_rotation(axes).tolist()


def _quaternion_products() -> Array:
    """Return the linear part [9, 16] of a rotation matrix's map to 4 * quaternion[i] * quaternion[j]."""
    x, y, z = np.eye(9).reshape(3, 3, 9)
    rows = [
        [x[0] - y[1] - z[2], x[1] + y[0], x[2] + z[0], z[1] - y[2]],
        [x[1] + y[0], y[1] - x[0] - z[2], y[2] + z[1], x[2] - z[0]],
        [x[2] + z[0], y[2] + z[1], z[2] - x[0] - y[1], y[0] - x[1]],
        [z[1] - y[2], x[2] - z[0], y[0] - x[1], x[0] + y[1] + z[2]],
    ]
    return np.array(rows).reshape(16, 9).T


_QUATERNION_PRODUCTS = _quaternion_products()


def rotation_from_vector(rotation_vector_rad: npt.ArrayLike) -> Array:
    """Return the rotation matrix [3, 3] of a rotation vector [3], axis times angle in radians (Rodrigues)."""
    vector = np.asarray(rotation_vector_rad, np.float64)
    angle = float(np.linalg.norm(vector))
    # axis * sin(angle / 2), written with np.sinc to stay exact near angle 0
    xyz = vector * (0.5 * np.sinc(angle / (2 * np.pi)))
    return rotation_from_quaternion([*xyz, np.cos(angle / 2)])


def vector_from_rotation(rotation: npt.ArrayLike) -> Array:
    """Return the rotation vector [3] in radians, of length 0..pi, of a rotation matrix [3, 3]."""
    quaternion = quaternion_from_rotation(rotation)
    sine = float(np.linalg.norm(quaternion[:3]))
    angle = 2 * np.arctan2(sine, quaternion[3])
    # near 0 the ratio of angle and sine is 2
    ratio = angle / sine if sine > _MIN_SINE else 2.0
    return quaternion[:3] * ratio


def cross_matrices(vectors: Array) -> Array:
    """Return [n, 3, 3] whose product with w is the cross product of vectors [n, 3] with w."""
    x, y, z = vectors.T
    zero = np.zeros_like(x)
    return np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1).reshape(-1, 3, 3)


def camera_matrix(intrinsics: Intrinsics) -> Array:
    """Return the camera matrix K [3, 3] in the form that OpenCV uses."""
    return np.array([[intrinsics.fx, 0, intrinsics.cx], [0, intrinsics.fy, intrinsics.cy], [0, 0, 1.0]])


def project(points_m: npt.ArrayLike, intrinsics: Intrinsics) -> Array:
    """Return pixels [n, 2] of camera-frame points [n, 3]; NaN for points that are not in front of the camera."""
    points = np.asarray(points_m, np.float64).reshape(-1, 3)
    pixels = np.full((len(points), 2), np.nan)
    front = points[:, 2] > 0
    # the lens bends the rays before the camera matrix scales them to pixels
    rays = points[front, :2] / points[front, 2:]
    if intrinsics.model != "none" and len(rays):
        rays = _distort(rays, intrinsics)
    pixels[front] = rays * (intrinsics.fx, intrinsics.fy) + (intrinsics.cx, intrinsics.cy)
    return pixels


def deproject(pixels: npt.ArrayLike, depth_m: npt.ArrayLike, intrinsics: Intrinsics) -> Array:
    """Return camera-frame points [n, 3] of pixels [n, 2] at `depth_m` (a number or [n]) along the optical axis."""
    rays = np.asarray(pixels, np.float64).reshape(-1, 2)
    rays = (rays - (intrinsics.cx, intrinsics.cy)) / (intrinsics.fx, intrinsics.fy)
    if intrinsics.model != "none" and len(rays):
        rays = _undistort(rays, intrinsics)
    depth = np.broadcast_to(np.asarray(depth_m, np.float64), len(rays))[:, None]
    return np.concatenate([rays * depth, depth], axis=1)


def _distort(rays: Array, intrinsics: Intrinsics) -> Array:
    import cv2

    points = np.concatenate([rays, np.ones((len(rays), 1))], axis=1)[:, None]
    coeffs = np.array(intrinsics.coeffs)
    zero = np.zeros(3)
    camera = cv2.fisheye if intrinsics.model == "fisheye" else cv2
    distorted = camera.projectPoints(points, zero, zero, np.eye(3), coeffs)[0]
    return cast(Array, distorted.reshape(-1, 2))


def _undistort(rays: Array, intrinsics: Intrinsics) -> Array:
    import cv2

    coeffs = np.array(intrinsics.coeffs)
    identity = np.eye(3)
    if intrinsics.model == "fisheye":
        undistorted = cv2.fisheye.undistortPoints(
            rays[:, None], identity, coeffs, criteria=_UNDISTORT_CRITERIA
        )
    else:
        undistorted = cv2.undistortPointsIter(
            rays[:, None], identity, coeffs, identity, identity, _UNDISTORT_CRITERIA
        )
    return cast(Array, undistorted.reshape(-1, 2))


def scale_intrinsics(intrinsics: Intrinsics, size: tuple[int, int], new_size: tuple[int, int]) -> Intrinsics:
    """Return the intrinsics of an image after resizing it from `size` to `new_size`, both (height, width).

    The distortion coefficients do not change.
    """
    y = new_size[0] / size[0]
    x = new_size[1] / size[1]
    return replace(
        intrinsics,
        fx=intrinsics.fx * x,
        fy=intrinsics.fy * y,
        # resizing scales about the corner of the top-left pixel, half a pixel from the origin of cx and cy
        cx=(intrinsics.cx + 0.5) * x - 0.5,
        cy=(intrinsics.cy + 0.5) * y - 0.5,
    )


MAX_WRAPPED_RAD = math.tau + 0.1
"""Largest angle of a joint that may have wrapped. Encoders wrap at half a turn or at a whole one; beyond that, a driver
counts turns, or the number is no angle."""


def interpolate_joints(first: Array, second: Array, share: npt.ArrayLike) -> Array:
    """Return the positions of joints at `share` of the way from the first [...] to the second [...], in rad or m.

    A joint that differs by more than half a turn has wrapped, as those without limits do: it goes the short way, and
    the result lies beside the nearer of both. No joint turns by half a turn between two messages, or slides by 3 m.
    """
    difference = second - first
    short: Array = (difference + np.pi) % math.tau - np.pi
    is_angle = np.maximum(np.abs(first), np.abs(second)) <= MAX_WRAPPED_RAD
    way = np.where(is_angle, short, difference)
    shares: Array = np.asarray(share, np.float64)
    found: Array = first + shares * way
    has_wrapped = is_angle & (np.abs(difference) > np.pi) & (shares > 0.5)
    return np.where(has_wrapped, found + (difference - way), found)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Conversion between pixels of a frame of `frame_size` (height, width) and of the model's square input.

    The frame fills the whole square, whose side is `model_size` pixels.
    """

    frame_size: tuple[int, int]
    model_size: int

    def to_model(self, pixels: npt.ArrayLike) -> Array:
        """Convert points [..., 2] (x, y) or boxes [..., 4] (x0, y0, x1, y1) from frame pixels to model pixels."""
        height, width = self.frame_size
        return _scale_axes(pixels, self.model_size / width, self.model_size / height)

    def to_frame(self, pixels: npt.ArrayLike) -> Array:
        """Convert points [..., 2] or boxes [..., 4] from model pixels to frame pixels."""
        height, width = self.frame_size
        return _scale_axes(pixels, width / self.model_size, height / self.model_size)


def _scale_axes(pixels: npt.ArrayLike, x: float, y: float) -> Array:
    array = np.asarray(pixels, np.float64)
    return cast(Array, array * np.resize((x, y), array.shape[-1]))


def mask_intersection(a: Mask, b: Mask) -> int:
    """Count the pixels inside both masks, which are of images of the same size."""
    x0 = max(a.box[0], b.box[0])
    y0 = max(a.box[1], b.box[1])
    x1 = min(a.box[2], b.box[2])
    y1 = min(a.box[3], b.box[3])
    if x0 >= x1 or y0 >= y1:
        return 0
    # the crops begin at the corners of the masks' own boxes
    of_a = a.crop[y0 - a.box[1] : y1 - a.box[1], x0 - a.box[0] : x1 - a.box[0]]
    of_b = b.crop[y0 - b.box[1] : y1 - b.box[1], x0 - b.box[0] : x1 - b.box[0]]
    return int(np.count_nonzero(np.logical_and(of_a, of_b)))


def mask_iou(a: Mask, b: Mask) -> float:
    """Return the intersection over union (0..1) of two masks of images of the same size; 0 if both are empty."""
    shared = mask_intersection(a, b)
    union = a.area + b.area - shared
    if not union:
        return 0.0
    return shared / union


class DepthMap(NamedTuple):
    """A depth image with what turns it into points."""

    image: DepthImage
    """uint16 [height, width], in units of `scale_m`; 0 is unknown"""
    scale_m: float
    rays: Float
    """[2, height, width], of `RayMap`"""
    focal_px: float


class RayMap:
    """Directions (x / z, y / z) of all pixels, float32 [2, height, width], computed when the intrinsics change."""

    def __init__(self) -> None:
        self._key: tuple[Intrinsics, tuple[int, int]] | None = None
        self._rays: Float = np.empty((2, 0, 0), np.float32)

    def rays(self, intrinsics: Intrinsics, size: tuple[int, int]) -> Float:
        """Return the directions for an image of `size` (height, width)."""
        if self._key != (intrinsics, size):
            rows, columns = np.indices(size)
            pixels = np.stack([columns, rows], axis=-1).reshape(-1, 2)
            rays = deproject(pixels, 1.0, intrinsics)[:, :2]
            self._rays = np.ascontiguousarray(rays.T.reshape(2, *size), np.float32)
            self._key = (intrinsics, size)
        return self._rays

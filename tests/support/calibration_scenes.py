"""Synthetic views for calibration: a camera looks at a board, a robot moves one of them; noise is added on request."""

from collections.abc import Sequence

import cv2
import numpy as np

from sam3_node.calibration import Calibration
from sam3_node.calibration.board_pdf import pattern
from sam3_node.calibration.boards import Board
from sam3_node.calibration.bundle import BoardView, expected_covariance, locate_board, to_solution
from sam3_node.calibration.hand_eye import HandEyeView, Mounting
from sam3_node.calibration.rigid_motion import move
from sam3_node.geometry import Array, camera_matrix, invert, rigid, rotation_from_vector
from sam3_node.types import Image, Intrinsics

BOARD = Board.parse("charuco:7x5:30mm:21mm:4x4_50")
CENTRE_M = (0.105, 0.075, 0.0)
"""Centre of BOARD's pattern in its frame."""
SIZE = (480, 640)
"""Height and width of the images."""
DENSITY = 8.0
"""Pixels per mm of a rendered board's texture."""
RIM_MM = 15.0
"""Width of its white rim."""
CAMERA = Intrinsics(600.0, 603.0, 322.0, 238.0, "brown_conrady", (-0.2, 0.08, 0.001, -0.0005, 0.0))
FISHEYE = Intrinsics(300.0, 301.0, 321.0, 239.0, "fisheye", (0.03, -0.01, 0.004, -0.001))

GRIPPER_FROM_CAMERA = rigid(rotation_from_vector([0.02, -0.03, 1.57]), [0.03, -0.07, 0.05])
BASE_FROM_BOARD = rigid(rotation_from_vector([3.0, 0.1, 0.2]), [0.5, 0.1, 0.0])
BASE_FROM_CAMERA = rigid(rotation_from_vector([2.0, 0.3, -0.4]), [1.0, 0.4, 0.8])
GRIPPER_FROM_BOARD = rigid(rotation_from_vector([0.1, 0.2, 0.3]), [0.02, -0.03, 0.1])
_MOUNTS = {
    "eye_in_hand": (GRIPPER_FROM_CAMERA, BASE_FROM_BOARD),
    "eye_to_hand": (BASE_FROM_CAMERA, GRIPPER_FROM_BOARD),
}


def calibrated(
    size: tuple[int, int],
    focal_px: float,
    kind: Mounting | None,
    rotation_vector: Sequence[float] = (0, 0, 0),
) -> Calibration:
    """Return the calibration of a camera with the optical axis at the image's middle, and at its parent's origin."""
    (height, width) = size
    focal = {"fx_px": focal_px, "fy_px": focal_px}
    middle = {"cx_px": (width - 1) / 2, "cy_px": (height - 1) / 2}
    mount = {"kind": kind, "translation_m": (0, 0, 0), "rotation_vector_rad": rotation_vector}
    fields = {"intrinsics": {"width_px": width, "height_px": height, **focal, **middle}}
    return Calibration.model_validate(fields | ({"hand_eye": mount} if kind else {}))


def project_board(camera_from_board: Array, intrinsics: Intrinsics, points: Array) -> Array:
    """Return the pixels [n, 2] of board points [n, 3]."""
    camera = to_solution(intrinsics, points)
    pose = np.concatenate([cv2.Rodrigues(camera_from_board[:3, :3])[0].ravel(), camera_from_board[:3, 3]])
    return camera.project(np.arange(len(points)), pose).pixels


def draw_pose(
    generator: np.random.Generator, near_m: float = 0.3, far_m: float = 0.5, tilt: float = 0.6
) -> Array:
    """Return camera_from_board [4, 4] of a board in front of the camera, tilted and turned at random."""
    tilted = rotation_from_vector([*generator.uniform(-tilt, tilt, 2), 0])
    rotation = tilted @ rotation_from_vector([0, 0, generator.uniform(-1.5, 1.5)])
    depth = generator.uniform(near_m, far_m)
    centre = np.array([*generator.uniform(-0.25, 0.25, 2) * (depth, 0.7 * depth), depth])
    return rigid(rotation, centre - rotation @ CENTRE_M)


def make_views(
    count: int,
    intrinsics: Intrinsics = CAMERA,
    noise_px: float = 0.1,
    seed: int = 1,
    points: Array | None = None,
    tilt: float = 0.6,
) -> list[BoardView]:
    """Return views of BOARD with all corners in the image; `points` [p, 3] make a board that is not flat."""
    generator = np.random.default_rng(seed)
    views: list[BoardView] = []
    near = (0.3, 0.5) if intrinsics.model != "fisheye" else (0.12, 0.25)
    while len(views) < count:
        pose = draw_pose(generator, *near, tilt)
        pixels = project_board(pose, intrinsics, BOARD.points if points is None else points)
        if _is_inside(pixels):
            noisy = pixels + generator.normal(0, noise_px, pixels.shape)
            views.append(BoardView(f"view{len(views)}", np.arange(len(pixels)), noisy))
    return views


def _is_inside(pixels: Array) -> bool:
    return bool(pixels.min() >= 0 and (pixels.max(axis=0) < SIZE[::-1]).all())


def make_hand_eye(
    count: int,
    mounting: Mounting = "eye_in_hand",
    *,
    noise_px: float = 0.3,
    robot_m: float = 3e-4,
    robot_rad: float = 5e-4,
    seed: int = 1,
    board_poses_only: bool = False,
    intrinsics: Intrinsics = CAMERA,
) -> tuple[Array, list[HandEyeView]]:
    """Return the true parent_from_camera [4, 4] and views with noise of the corners and of the robot's poses.

    With `board_poses_only` the covariances are those that follow from poses without images, see `expected_covariance`.
    """
    generator = np.random.default_rng(seed)
    x, y = _MOUNTS[mounting]
    found: list[tuple[Array, Array, Array, float]] = []
    while len(found) < count:
        pose = draw_pose(generator)
        pixels = project_board(pose, intrinsics, BOARD.points)
        if not _is_inside(pixels):
            continue
        chain = y @ invert(pose) @ invert(x)
        robot = chain if mounting == "eye_in_hand" else invert(chain)
        noise = np.concatenate([generator.normal(0, robot_m, 3), generator.normal(0, robot_rad, 3)])
        robot = move(robot, noise)
        noisy = pixels + generator.normal(0, noise_px, pixels.shape)
        view = BoardView(str(len(found)), np.arange(len(pixels)), noisy)
        found.append((robot, *locate_board(view, BOARD, intrinsics)))
    variance = float(np.median([sigma for *_, sigma in found])) ** 2
    return x, [
        HandEyeView(
            f"view{number}",
            robot,
            pose,
            expected_covariance(pose, BOARD, intrinsics) if board_poses_only else covariance * variance,
        )
        for number, (robot, pose, covariance, _) in enumerate(found)
    ]


def draw_kalibr(board: Board, border_bits: int) -> np.ndarray:
    """Draw Kalibr's AprilGrid as a texture: ids from the bottom left, each tag turned by half a turn, black squares."""
    side, gap = (round(length * 1e3 * DENSITY) for length in (board.pitch_m, board.second_m))
    tags = cv2.aruco.getPredefinedDictionary(cv2.aruco.DICT_APRILTAG_36h11)
    step = side + gap
    rim = round(RIM_MM * DENSITY)
    height = board.rows * step - gap
    width = board.columns * step - gap
    image = np.full((height + 2 * rim, width + 2 * rim), 255, np.uint8)
    for row in range(board.rows + 1):
        for column in range(board.columns + 1):
            top = rim + row * step - gap
            left = rim + column * step - gap
            image[top : top + gap, left : left + gap] = 0
    for row in range(board.rows):
        for column in range(board.columns):
            tag = cv2.aruco.generateImageMarker(
                tags, row * board.columns + column, side, borderBits=border_bits
            )
            top = rim + (board.rows - 1 - row) * step
            left = rim + column * step
            image[top : top + side, left : left + side] = tag[::-1, ::-1]
    return image


def draw_charuco(board: Board, legacy: bool) -> np.ndarray:
    """Draw a ChArUco board by OpenCV as a texture."""
    dictionary = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, f"DICT_{board.dictionary}"))
    ids = np.arange(board.first, board.first + board.columns * board.rows // 2)
    size = (board.columns, board.rows)
    drawn = cv2.aruco.CharucoBoard(size, board.pitch_m, board.second_m, dictionary, ids)
    drawn.setLegacyPattern(legacy)
    width, height = (round(side * 1e3 * DENSITY) for side in board.size_m)
    rim = round(RIM_MM * DENSITY)
    return cv2.copyMakeBorder(
        drawn.generateImage((width, height)), rim, rim, rim, rim, cv2.BORDER_CONSTANT, value=[255]
    )


def render(
    board: Board,
    camera_from_board: Array,
    intrinsics: Intrinsics,
    size: tuple[int, int] = SIZE,
    texture: np.ndarray | None = None,
) -> Image:
    """Render a board by a homography, without distortion, as BGR [h, w, 3] with soft edges.

    `texture` is what was printed, DENSITY pixels per mm with a rim of RIM_MM; None for what this package prints.
    """
    density = DENSITY
    border = RIM_MM
    factor = 4
    texture = rasterise(board, density, border) if texture is None else texture
    offset = board.pitch_m if board.kind == "chessboard" else 0.0  # the origin is the first inner corner
    # texture pixel -> board metres, with pixel centres at integers
    scale = 1e-3 / density
    shift = 0.5 * scale - border * 1e-3 - offset
    to_board = np.array([[scale, 0, shift], [0, scale, shift], [0, 0, 1]])
    pose = camera_from_board[:3, [0, 1, 3]]
    to_large = np.array([[factor, 0, (factor - 1) / 2], [0, factor, (factor - 1) / 2], [0, 0, 1]])
    homography = to_large @ camera_matrix(intrinsics) @ pose @ to_board
    large = cv2.warpPerspective(
        texture, homography, (size[1] * factor, size[0] * factor), borderValue=200, flags=cv2.INTER_LINEAR
    )
    small = cv2.resize(large, size[::-1], interpolation=cv2.INTER_AREA)
    return np.asarray(cv2.cvtColor(small, cv2.COLOR_GRAY2BGR), np.uint8)


def render_views(
    board: Board, intrinsics: Intrinsics, count: int, seed: int = 3, texture: np.ndarray | None = None
) -> Sequence[tuple[Array, Image]]:
    """Return poses camera_from_board and rendered images of them."""
    generator = np.random.default_rng(seed)
    low = board.points.min(axis=0) - board.pitch_m
    high = board.points.max(axis=0) + board.pitch_m
    rim = np.array([[x, y, 0] for x in (low[0], high[0]) for y in (low[1], high[1])])
    pairs: list[tuple[Array, Image]] = []
    while len(pairs) < count:
        pose = draw_pose(generator, 0.35, 0.55, 0.5)
        if _is_inside(project_board(pose, intrinsics, rim)):
            pairs.append((pose, render(board, pose, intrinsics, texture=texture)))
    return pairs


def rasterise(board: Board, pixels_per_mm: float, border_mm: float = 10.0) -> np.ndarray:
    """Draw the pattern as a grey image with a white border, to show on a screen or to render views of it."""
    width, height = (round((side * 1e3 + 2 * border_mm) * pixels_per_mm) for side in board.size_m)
    image = np.full((height, width), 255, np.uint8)
    for x, y, wide, high in pattern(board):
        first = np.round((np.array([x, y]) + border_mm) * pixels_per_mm).astype(int)
        last = np.round((np.array([x + wide, y + high]) + border_mm) * pixels_per_mm).astype(int)
        cv2.rectangle(image, tuple(map(int, first)), tuple(map(int, last - 1)), 0, cv2.FILLED)
    return image

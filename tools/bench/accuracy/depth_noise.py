"""A noise model of the depth camera D435, for depth that is exact."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

FOCAL_PX, BASELINE_M = 447.0, 0.05
DISPARITY_NOISE_PX = 0.08
DISPARITY_STEP_PX = 1 / 32
"""Resolution, focal length and baseline of a D435 at 848x480, and its noise and step of disparity, after
https://dev.intelrealsense.com/docs/tuning-depth-cameras-for-best-performance: 3.6 mm at 1 m, growing with the squared
distance."""
CORRELATION_PX = 1.5
"""Sigma of the blur of white noise: neighbours share the stereo window."""
EDGE_STEP = 0.02
"""Relative step of depth that is an edge."""
EDGE_HOLES, EDGE_FLYING = 0.4, 0.3
"""Shares of the pixels at edges that have no depth, and that have one between both sides."""


def add_noise(depth_m: npt.NDArray[np.float64], random: np.random.Generator) -> npt.NDArray[np.uint16]:
    """Return exact depth [h, w] in metres (0: none) as the camera would measure it, uint16 [h, w] in millimetres."""
    z = depth_m.astype(np.float32)
    white = random.normal(size=z.shape).astype(np.float32)
    smooth = cv2.GaussianBlur(white, (0, 0), CORRELATION_PX)
    smooth /= smooth.std()
    disparity = FOCAL_PX * BASELINE_M / np.maximum(z, 0.1) + DISPARITY_NOISE_PX * smooth
    disparity = np.round(disparity / DISPARITY_STEP_PX) * DISPARITY_STEP_PX
    noisy = FOCAL_PX * BASELINE_M / np.maximum(disparity, 0.1)
    kernel = np.ones((3, 3), np.uint8)
    far, near = cv2.dilate(z, kernel), cv2.erode(z, kernel)
    edge = far - near > EDGE_STEP * z
    edge = cv2.dilate(edge.astype(np.uint8), kernel) > 0  # about 2 px on both sides
    far, near = cv2.dilate(far, kernel), cv2.erode(near, kernel)
    chance = random.random(z.shape)
    between = near + random.random(z.shape) * (far - near)
    noisy = np.where(edge & (chance < EDGE_FLYING), between, noisy)
    noisy = np.where(edge & (chance > 1 - EDGE_HOLES) | (z <= 0), 0, noisy)
    return np.clip(np.round(1000 * noisy), 0, 65535).astype(np.uint16)

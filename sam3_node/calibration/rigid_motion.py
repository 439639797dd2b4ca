"""Stacks of rigid transforms [n, 4, 4]: residuals, adjoints and means.

A small motion is xi = (translation [3] in metres, rotation vector [3] in radians), applied on the right: T exp(xi),
that is, in the frame of the child.
"""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation

from ..geometry import Array, rigid, rotation_from_vector


def invert_all(transforms: Array) -> Array:
    """Return the inverses of transforms [n, 4, 4]."""
    inverses = np.tile(np.eye(4), (len(transforms), 1, 1))
    turned = np.swapaxes(transforms[:, :3, :3], 1, 2)
    inverses[:, :3, :3] = turned
    inverses[:, :3, 3] = -(turned @ transforms[:, :3, 3:])[..., 0]
    return inverses


def scale_positions(transforms: Array, factor: float) -> Array:
    """Return transforms [n, 4, 4] with their translations multiplied by a factor."""
    scaled = transforms.copy()
    scaled[:, :3, 3] *= factor
    return scaled


def move(transform: Array, motion: Array) -> Array:
    """Return transform exp(motion), for a small motion [6]."""
    return transform @ rigid(rotation_from_vector(motion[3:]), motion[:3])


def to_motions(transforms: Array) -> Array:
    """Return translation and rotation vector [n, 6] of transforms [n, 4, 4]."""
    rotations = Rotation.from_matrix(transforms[:, :3, :3]).as_rotvec()
    return np.concatenate([transforms[:, :3, 3], rotations], axis=1)


def adjoints(transforms: Array) -> Array:
    """Return [n, 6, 6] that convert motions xi of the child's frame to the parent's: T exp(xi) = exp(Ad xi) T."""
    found = np.zeros((len(transforms), 6, 6))
    rotations = transforms[:, :3, :3]
    found[:, :3, :3] = found[:, 3:, 3:] = rotations
    found[:, :3, 3:] = cross_matrices(transforms[:, :3, 3]) @ rotations
    return found


def cross_matrices(vectors: Array) -> Array:
    """Return [n, 3, 3] whose product with w is the cross product of vectors [n, 3] with w."""
    x, y, z = vectors.T
    zero = np.zeros_like(x)
    return np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=-1).reshape(-1, 3, 3)


def average(transforms: Array) -> Array:
    """Return the mean of transforms [n, 4, 4] that differ little; rotations by their chordal mean."""
    left, _, right = np.linalg.svd(transforms[:, :3, :3].sum(0))
    return rigid(left @ np.diag([1, 1, np.linalg.det(left @ right)]) @ right, transforms[:, :3, 3].mean(0))


def measure_rotations(transforms: Array) -> Array:
    """Return the root mean square angles [3] in radians, largest first, by which pairs turn about their main axes."""
    first, second = np.triu_indices(len(transforms), 1)
    turned = np.swapaxes(transforms[first, :3, :3], 1, 2) @ transforms[second, :3, :3]
    vectors = Rotation.from_matrix(turned).as_rotvec()
    scatter = vectors.T @ vectors / max(len(vectors), 1)
    return np.asarray(np.sqrt(np.maximum(np.linalg.eigvalsh(scatter)[::-1], 0)), np.float64)

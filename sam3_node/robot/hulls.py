"""Convex hulls of few corners, as convex bodies of a robot.

The robot's drawing projects and cuts each hull at each frame. `thin_hull` replaces a hull of many corners by one of
few corners around it. This module imports nothing of the package, because the process that reads meshes also uses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]

MAX_CORNERS = 256
"""Corners of a hull. A mesh with more gets a hull of this many around it, whose error the log tells in millimetres."""
FIRST_DIRECTIONS = 64
"""Directions whose farthest corners begin a thinned hull. The other corners are chosen by what these leave outside."""
ROUNDS = 6
"""Steps in which the other corners are chosen. More would choose them better, and take longer at the start."""
ROUND_OFF = 1e-9
"""Share by which a corner may lie outside of a hull that has it as a corner."""
FLAT = 1e-9
"""Thickness of a body, as a share of its size, below which it is flat. Rounding alone gives a plane 1e-16 to 1e-12."""
BLOCK = 4096
"""Corners that are compared with all faces at once, so that 300,000 corners need little memory."""


class Hull(NamedTuple):
    """The corners of a convex hull, and how it was thinned."""

    corners: Points
    """[n, 3]"""
    centre: Points
    """[3]: the point from which a thinned hull was grown"""
    growth: float
    """How many times larger the thinned hull is than that of the corners that were kept; 1.0 if all were."""

    def scale(self, factors: Any) -> Hull:
        """Return the hull in other units, by a factor or one for each axis."""
        return Hull(self.corners * factors, self.centre * factors, self.growth)

    def bound_error(self) -> float:
        """Return the distance of the thinned hull from the whole one, at most, in the unit of the corners."""
        grown = (self.corners - self.centre) * (1 - 1 / self.growth)
        return float(np.linalg.norm(grown, axis=1).max())


def thin_hull(corners: Points) -> Hull:
    """Return a hull of at most MAX_CORNERS corners around the corners [n, 3] of a hull.

    Some corners are kept, and grown from their centre until all others are inside. So no pixel of the body is lost.
    """
    if len(corners) <= MAX_CORNERS:
        return Hull(corners, corners.mean(axis=0), 1.0)

    # in the unit cube, so that the directions look at a long body from all its sides
    low = corners.min(axis=0)
    size = corners.max(axis=0) - low
    # a flat body stays flat
    size = np.where(size > 0, size, 1.0)
    cube = (corners - low) / size
    kept = np.unique((cube @ _spread_directions(FIRST_DIRECTIONS).T).argmax(axis=0))
    apart = _leave_out_flat(cube)
    for round_ in range(ROUNDS):
        farthest, reach = _find_farthest(apart, apart[kept])
        best = farthest[np.argsort(-reach)]
        room = MAX_CORNERS - len(kept)
        chosen = best[: -(-room // (ROUNDS - round_))]
        kept = np.unique(np.append(kept, chosen))

    _, reach = _find_farthest(apart, apart[kept])
    growth = max(1.0, float(reach.max()))
    centre = cube[kept].mean(axis=0)
    grown = centre + growth * (cube[kept] - centre)
    return Hull(low + grown * size, low + centre * size, growth)


def _spread_directions(count: int) -> Points:
    """Return unit vectors that are spread over the sphere, on Fibonacci's spiral."""
    step = np.arange(count) + 0.5
    z = 1 - 2 * step / count
    around = np.pi * (1 + 5**0.5) * step
    across = np.sqrt(1 - z * z)
    return np.column_stack([across * np.cos(around), across * np.sin(around), z])


def _leave_out_flat(points: Points) -> Points:
    """Return points [n, 3] in the plane [n, 2] of a flat body, and those of another body as they are."""
    _, _, axes = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    extents = np.ptp(points @ axes.T, axis=0)
    is_thick = extents > FLAT * extents.max()
    # a hull without volume has no faces, but its outline has edges
    return points if is_thick.all() else points @ axes[is_thick].T


def _find_farthest(points: Points, kept: Points) -> tuple[npt.NDArray[np.int64], Points]:
    """Return the point that is farthest outside of each face of the hull of `kept`, and how far it is.

    The points are [n, 3], or [n, 2] in a plane, where the faces are edges. The distance is relative: 1 is on the face,
    2 is twice as far from the mean of `kept`. Faces without a point outside are left out, but for the farthest of all.
    """
    from scipy.spatial import ConvexHull  # here, because it slows the start of a node without a robot

    centre = kept.mean(axis=0)
    faces = ConvexHull(kept).equations
    # the centre is inside: its distance from each face is positive
    normals = faces[:, :-1] / -(faces[:, :-1] @ centre + faces[:, -1])[:, None]
    reach = np.full(len(faces), -np.inf)
    farthest = np.zeros(len(faces), np.int64)
    for start in range(0, len(points), BLOCK):
        found = (points[start : start + BLOCK] - centre) @ normals.T
        best = found.argmax(axis=0)
        value = found[best, np.arange(len(faces))]
        farther = value > reach
        reach[farther] = value[farther]
        farthest[farther] = start + best[farther]
    outside = reach > 1 + ROUND_OFF
    outside[reach.argmax()] = True
    return farthest[outside], reach[outside]

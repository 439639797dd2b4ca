"""Describe what a motion planner must not run into, from what the last step has measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...geometry import quaternion_from_rotation
from ...schema.replies import Container, SceneBox
from ..step import BASE
from .containers import Inside, find_inside, measure_fill
from .picking import DIGITS, PickScene


def list_boxes(scene: PickScene) -> list[SceneBox]:
    """Return the upright boxes of the sure objects that the gripper does not hold."""
    boxes = []
    for one in scene.instances:
        if not one.is_sure or one.held or one.frame != BASE:
            continue
        centre = one.upright_centre_m
        quaternion = one.upright_quaternion_xyzw
        size = one.upright_size_m
        if centre is not None and quaternion is not None and size is not None:
            boxes.append(SceneBox(one.id, one.label, centre, quaternion, size, one.confidence))
    return boxes


def describe_container(scene: PickScene, given: Sequence[float]) -> Container | None:
    """Return the container in the base with its fill: the given one, else the one that the frame shows.

    `given` is the setting spatial.container. Without depth, the given one has no fill.
    """
    up = None if scene.table is None else np.array(scene.table.normal)
    view = None
    if scene.depth is not None and scene.camera_pose is not None and up is not None:
        view = scene.view(scene.depth)
    inside: Inside | None = None
    if given:
        inside = Inside.of(given, np.array([0.0, 0.0, 1.0]) if up is None else up)
    elif view is not None:
        inside = find_inside(view)
    if inside is None:
        return None
    fill = None if view is None else measure_fill(view, inside)
    x, y, z = np.round(inside.floor_m, DIGITS).tolist()
    length, width, depth = np.round(inside.size_m, DIGITS).tolist()
    quaternion = np.round(quaternion_from_rotation(inside.axes), DIGITS)
    return Container(
        position_m=(x, y, z),
        quaternion_xyzw=tuple(quaternion.tolist()),
        inside_m=(length, width, depth),
        fill=None if fill is None else round(fill, 3),
    )

"""Rank the objects of a frame for picking, with the reason of each rank, and say why the others must not be picked.

Free objects come first, and of them the highest: nothing lies on it, and it leaves the others as they are. All is
computed when a user asks for it, from the masks and the depth of the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from ...geometry import Array, DepthMap, axes_along, matrix_of, quaternion_from_rotation
from ...resumable import Resumable
from ...schema.operations import NextPick
from ...schema.replies import ParallelGrip, Pick, RefusedObject, SuctionPoint
from ...types import FramePose, Instance, Mask, Plane
from ..objects import ObjectStatus
from ..step import StepFrame
from ..surfaces import MIN_PIXELS, Bools, measure_surfaces
from .coverage import Coverage, find_coverage
from .grips import TOP_PERCENTILE, FingerGrip, find_grips, has_room, list_upper_points
from .suction import FlatDisc, find_flat_disc, goes_on, is_blocked
from .view import NO_OBJECT, PickView

MIN_DEPTH_SHARE = 0.5
"""Share of a mask's pixels with a depth, below which the object may be shiny or transparent."""
SURFACE_POINTS = 1500
"""Points of a surface that a grip is found from, about."""
CUP_RADIUS_M = 0.01
OPENING_M = 0.085
MAX_AGE_MS = 500.0
DIGITS = 6
"""Digits of lengths in metres, and of directions."""


class PickLimits(NamedTuple):
    """What the robot can do, and what the user permits."""

    cup_radius_m: float = CUP_RADIUS_M
    opening_m: float = OPENING_M
    reach_m: float | None = None
    """from the base's origin; None: any"""
    max_age_ms: float = MAX_AGE_MS
    covered: bool = False
    """True: also objects that others may lie on"""

    @classmethod
    def of(cls, request: NextPick) -> Self:
        """Return the limits of a request. What it does not say has its default."""
        given = {name: getattr(request, name) for name in cls._fields}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class PickScene:
    """What the last step knows, as far as a pick needs it."""

    seq: int = 0
    age_origin_ns: int = 0
    """Unix time from which its age is measured, see `MaskFrame.age_origin_ns`"""
    instances: Sequence[Instance] = ()
    depth: DepthMap | None = None
    camera_pose: FramePose | None = None
    table: Plane | None = None
    robot: Bools | None = None

    @classmethod
    def of(cls, step: StepFrame) -> Self:
        """Return what a step knows at its end."""
        robot = None if step.robot is None else step.robot.inside
        frame = step.frame
        age_origin_ns = frame.capture_ns if frame.clock == "system" else step.received_ns
        return cls(frame.seq, age_origin_ns, step.instances, step.depth, step.camera_pose, step.table, robot)

    def view(self, depth: DepthMap) -> PickView:
        """Return the frame's points and the masks of all instances, in their order."""
        base_from_camera = None if self.camera_pose is None else matrix_of(self.camera_pose)
        masks = [instance.mask for instance in self.instances]
        return PickView(depth, base_from_camera, self.table, self.robot, masks)


class Picks(NamedTuple):
    """The ranked objects of a frame, and the others."""

    frame: str | None
    """None without depth"""
    up: tuple[float, float, float] | None
    picks: Sequence[Pick]
    refused: Sequence[RefusedObject]


class _Candidate(NamedTuple):
    """An object that can be taken."""

    instance: Instance
    coverage: Coverage
    disc: FlatDisc | None
    grip: FingerGrip | None
    top_m: float
    """height of its top along `up`"""
    distance_m: float | None


def rank_picks(
    scene: PickScene,
    objects: Sequence[ObjectStatus],
    limits: PickLimits,
    label: str | None = None,
    age_ms: float | None = None,
) -> Resumable[Picks]:
    """Rank the objects of a label, or all for None, on a frame of this age; None: its age says nothing.

    An object takes some milliseconds, so each has a turn.

    `objects` are all that are tracked, also those without an instance on the frame.
    """
    wanted = [status for status in objects if label is None or status.label == label]
    refused = dict[int, str]()
    instances = {instance.id: instance for instance in scene.instances}
    for status in wanted:
        why = _refuse(instances.get(status.id), limits, age_ms)
        if why is None and scene.depth is None:
            why = "expected a frame with depth and intrinsics, found none: without them no place is known"
        if why is not None:
            refused[status.id] = why
    view = None if scene.depth is None else scene.view(scene.depth)
    candidates = list[_Candidate]()
    left = [status.id for status in wanted if status.id not in refused]
    if view is not None and left:
        candidates = yield from _list_candidates(scene, view, left, limits, refused)
    picks = [] if view is None else _rank(view, scene.instances, candidates)
    up = None if view is None else _round(view.up)
    others = [RefusedObject(one.id, one.label, refused[one.id]) for one in wanted if one.id in refused]
    return Picks(None if view is None else view.frame, up, picks, others)


def _refuse(instance: Instance | None, limits: PickLimits, age_ms: float | None) -> str | None:
    """Return why an object must not be picked, as far as its mask says; None if nothing is against it."""
    if age_ms is not None and age_ms > limits.max_age_ms:
        return f"its mask is old: expected at most {limits.max_age_ms:g} ms, found {age_ms:.0f}"
    if instance is None:
        return "the latest frame has no mask of it; ask again on the next one"
    if instance.held:
        return "the gripper holds it"
    if instance.state == "tentative":
        return "it is tentative: a name has found it, and no further frame has confirmed it yet"
    if instance.state == "occluded" or not instance.mask.area:
        return "it is hidden" + (f" by the {instance.hidden_by}" if instance.hidden_by else "")
    if instance.doubtful:
        shares = {"mask": instance.confidence, "name": instance.name_confidence}
        found = ", ".join(f"{what} {share:.2f}" for what, share in shares.items() if share is not None)
        return (
            f"the node doubts its mask or its name: confidence {found}; correct it, or wait until it is sure"
        )
    return None


def _list_candidates(
    scene: PickScene, view: PickView, ids: Sequence[int], limits: PickLimits, refused: dict[int, str]
) -> Resumable[list[_Candidate]]:
    """Return the objects of `ids` that can be taken, in turns. The reasons of the others are added to `refused`."""
    coverage = find_coverage(view)
    chosen = [index for index, instance in enumerate(scene.instances) if instance.id in ids]
    surfaces = measure_surfaces([view.masks[index] for index in chosen], view.depth, SURFACE_POINTS)
    points = dict(zip(surfaces.indices, surfaces.points_m, strict=True))
    candidates = []
    for number, index in enumerate(chosen):
        yield
        instance = scene.instances[index]
        share = surfaces.shares[number]
        measured = points.get(number)
        why = None
        if share < MIN_DEPTH_SHARE or measured is None:
            why = (
                f"expected a depth at {MIN_DEPTH_SHARE:.0%} of its mask, found it at {share:.0%}: it may be shiny, "
                "transparent, too near or too far"
            )
        elif not limits.covered:
            why = _explain_cover(scene.instances, coverage[index])
        if why is None and measured is not None:
            found = _take(view, index, instance, coverage[index], list_upper_points(view, measured), limits)
            if isinstance(found, str):
                why = found
            else:
                candidates.append(found)
        if why is not None:
            refused[instance.id] = why
    return candidates


def _explain_cover(instances: Sequence[Instance], coverage: Coverage) -> str | None:
    """Return that something may lie on an object; None if nothing does."""
    if coverage.is_free:
        return None
    if coverage.is_free is None:
        return (
            "too little depth is known around it to tell if something lies on it: expected it along half of its "
            f"outline, found it along {coverage.known:.0%}"
        )
    names = [
        "something that is not tracked" if index == NO_OBJECT else f"object {instances[index].id}"
        for index in coverage.by
    ]
    return f"{' and '.join(names[:2]) or 'something'} lies on it, or stands higher against it"


def _take(
    view: PickView, index: int, instance: Instance, coverage: Coverage, points_m: Array, limits: PickLimits
) -> _Candidate | str:
    """Return how an object can be taken, or why it cannot."""
    if len(points_m) < MIN_PIXELS:
        return (
            "nothing of it stands out of the table: expected at least 5 mm, and more than the noise of depth"
        )
    disc = find_flat_disc(view, view.masks[index], limits.cup_radius_m)
    why_no_disc = f"no flat place of {1000 * limits.cup_radius_m:g} mm radius that faces up"
    if disc is not None and is_blocked(view, index, disc):
        disc = None
        why_no_disc = "something is in the way of a suction cup"
    if disc is not None and goes_on(view, index, disc):
        disc = None
        why_no_disc = "its flat surface goes on beyond its mask, as a floor or a wall does"
    is_cut = _reaches_border(instance.mask)
    grips = [] if is_cut else find_grips(view, points_m)
    fitting = [grip for grip in grips if grip.width_m <= limits.opening_m]
    free = [grip for grip in fitting if has_room(view, index, grip)]
    if disc is None and not free:
        why_no_grip = "no room beside it for fingers"
        if is_cut:
            why_no_grip = "it reaches beyond the picture, so its width is unknown"
        elif not grips:
            why_no_grip = "too flat for fingers"
        elif not fitting:
            width_mm = 1000 * grips[0].width_m
            why_no_grip = (
                f"{width_mm:.0f} mm wide, which the gripper's {1000 * limits.opening_m:g} mm do not take"
            )
        return f"it cannot be taken: {why_no_disc}; {why_no_grip}"
    grip = free[0] if free else None
    place = disc.point_m if disc is not None else free[0].point_m
    distance_m = None if view.base_from_camera is None else float(np.linalg.norm(place))
    if limits.reach_m is not None and distance_m is not None and distance_m > limits.reach_m:
        return f"out of reach: expected at most {limits.reach_m:g} m from the base, found {distance_m:.2f} m"
    top_m = float(np.percentile(points_m @ view.up, TOP_PERCENTILE))
    return _Candidate(instance, coverage, disc, grip, top_m, distance_m)


def _reaches_border(mask: Mask) -> bool:
    x0, y0, x1, y1 = mask.box
    height, width = mask.size
    return x0 == 0 or y0 == 0 or x1 == width or y1 == height


def _rank(view: PickView, instances: Sequence[Instance], candidates: Sequence[_Candidate]) -> list[Pick]:
    """Return the picks in their order: free ones first, and of them the highest."""
    ordered = sorted(candidates, key=lambda one: (not one.coverage.is_free, -one.top_m, one.instance.id))
    free = sum(bool(one.coverage.is_free) for one in ordered)
    picks = []
    for rank, one in enumerate(ordered, start=1):
        before = ordered[rank - 2] if rank > 1 else None
        reason = _explain_rank(view, instances, one, before, free)
        picks.append(_describe(view, instances, one, rank, reason))
    return picks


def _explain_rank(
    view: PickView, instances: Sequence[Instance], one: _Candidate, before: _Candidate | None, free: int
) -> str:
    """Return why an object comes after the one before it; None: it is the first."""
    why_covered = _explain_cover(instances, one.coverage)
    if why_covered is not None:
        return f"after the {free} that are free: {why_covered}"
    where = "" if view.floor_m is None else f", {1000 * (one.top_m - view.floor_m):.0f} mm above the table"
    if before is not None:
        lower_mm = 1000 * (before.top_m - one.top_m)
        return f"nothing lies on it; its top is {lower_mm:.0f} mm below that of object {before.instance.id}{where}"
    of = "" if free == 1 else f", and of {free} such objects it is the highest"
    return f"nothing lies on it{of}{where}"


def _describe(view: PickView, instances: Sequence[Instance], one: _Candidate, rank: int, reason: str) -> Pick:
    """Return a pick as the reply has it."""
    suction = None
    if one.disc is not None:
        suction = SuctionPoint(
            position_m=_round(one.disc.point_m),
            quaternion_xyzw=_turn(axes_along(-one.disc.normal)),
            normal=_round(one.disc.normal),
            radius_m=round(one.disc.radius_m, DIGITS),
        )
    grip = None
    if one.grip is not None:
        grip = ParallelGrip(
            position_m=_round(one.grip.point_m),
            quaternion_xyzw=_turn(one.grip.rotation),
            approach=_round(one.grip.rotation[:, 2]),
            width_m=round(one.grip.width_m, DIGITS),
        )
    return Pick(
        id=one.instance.id,
        label=one.instance.label,
        rank=rank,
        reason=reason,
        confidence=one.instance.confidence,
        depth_share=one.instance.depth_share,
        free_above=bool(one.coverage.is_free),
        free_share=round(one.coverage.free, 4),
        under=tuple(instances[index].id for index in one.coverage.by if index != NO_OBJECT),
        visible_share=round(one.coverage.visible, 4),
        height_m=None if view.floor_m is None else round(one.top_m - view.floor_m, DIGITS),
        distance_m=None if one.distance_m is None else round(one.distance_m, DIGITS),
        suction=suction,
        grip=grip,
    )


def _round(values: Array) -> tuple[float, float, float]:
    x, y, z = np.round(values, DIGITS).tolist()
    return x, y, z


def _turn(rotation: Array) -> tuple[float, float, float, float]:
    x, y, z, w = np.round(quaternion_from_rotation(rotation), DIGITS).tolist()
    return x, y, z, w

"""Masks moved to another time: known motion in the image and in 3-D, and what is left as it was."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.client import PerceptionClient
from sam3_node.transport import MaskPublisher
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.wire import pack_masks
from tests.support.patience import PATIENCE_MS
from tests.support.tables import each_row
from tests.support.transport_peer import make_masks, wait_until

HEIGHT = 80
WIDTH = 120
RADIUS = 12
GAP_MS = 100
START = (60, 40)
STEP = (8, -4)
"""Pixels to the right and down in GAP_MS."""
PLACE_M = (0.1, 0.2, 0.9)
VELOCITY_MPS = (0.5, -1.0, 0.2)
VARIANCE_M2 = 1e-4


def disc(x: float, y: float) -> Mask:
    rows, columns = np.indices((HEIGHT, WIDTH))
    return Mask.from_full((columns - x) ** 2 + (rows - y) ** 2 <= RADIUS**2)


def masks_at(ms: int, shape: Mask, **changes: Any) -> MaskFrame:
    instance = replace(Instance(1, "disc", 0.9, "tracked", 5, 0, shape), **changes)
    return MaskFrame("cam0", ms, ms * 1_000_000, WIDTH, HEIGHT, instances=(instance,), epoch=5)


def moving(start: tuple[int, int] = START, **changes: Any) -> MaskFrame:
    """Return masks of a disc that has made a step to `start` since the masks before."""
    before = masks_at(1000, disc(start[0] - STEP[0], start[1] - STEP[1]))
    return replace(masks_at(1000 + GAP_MS, disc(*start), **changes), before=before)


def ahead(masks: MaskFrame, ms: float) -> int:
    return masks.capture_ns + round(ms * 1e6)


@each_row(
    ("start", "steps"),
    [*((START, steps) for steps in (-1, 0, 0.25, 0.5, 1, 2)), *(((104, 20), steps) for steps in (1, 2, 4))],
)
def test_a_moved_mask_is_the_disc_at_that_time_cut_off_at_the_border(
    start: tuple[int, int], steps: float
) -> None:
    masks = moving(start)
    moved, unmoved = masks.moved_to(ahead(masks, steps * GAP_MS), max_ms=1000)
    assert not unmoved
    truth = disc(start[0] + steps * STEP[0], start[1] + steps * STEP[1])
    assert np.array_equal(moved.instances[0].mask.full(), truth.full())
    assert moved.instances[0].box == truth.box
    assert (moved.key, moved.age_origin_ns) == (masks.key, masks.age_origin_ns)


def test_a_mask_that_only_grows_or_is_cut_by_the_border_stays_in_place() -> None:
    both = Mask.from_full(disc(56, 40).full() | disc(64, 40).full())
    for earlier, later in ((disc(60, 40), both), (disc(112, 40), disc(116, 40))):
        masks = replace(masks_at(1100, later), before=masks_at(1000, earlier))
        moved, unmoved = masks.moved_to(ahead(masks, GAP_MS))
        assert not unmoved
        assert moved.instances[0].box == masks.instances[0].box


SURE = moving()
EMPTY = Mask.empty((HEIGHT, WIDTH))
UNMOVED: dict[str, tuple[MaskFrame, float, str]] = {
    "older than the limit": (SURE, 251, "too far"),
    "long before the capture": (SURE, -251, "too far"),
    "occluded": (moving(state="occluded"), 50, "hidden"),
    "without a mask": (moving(mask=EMPTY), 50, "hidden"),
    "doubtful": (moving(doubtful=True), 50, "doubtful"),
    "the first masks": (replace(SURE, before=None), 50, "no motion"),
    "of another epoch": (replace(SURE, epoch=6), 50, "no motion"),
    "of another object": (moving(id=2), 50, "no motion"),
    "doubtful before": (replace(SURE, before=masks_at(1000, disc(52, 44), doubtful=True)), 50, "no motion"),
    "without a mask before": (replace(SURE, before=masks_at(1000, EMPTY)), 50, "no motion"),
    "tentative": (moving(state="tentative"), 50, "doubtful"),
    "long after the masks before": (replace(SURE, capture_ns=1_501_000_000), 50, "no motion"),
    "not after the masks before": (replace(SURE, capture_ns=1_000_000_000), 50, "no motion"),
    "of another size": (moving(mask=Mask.from_full(np.ones((9, 9), np.bool_))), 50, "no motion"),
    "with a position and no velocity": (moving(position_m=PLACE_M, frame="base"), 50, "no motion"),
}


@each_row(("masks", "ms", "why"), UNMOVED.values(), ids=UNMOVED)
def test_an_instance_is_left_as_it_was(masks: MaskFrame, ms: float, why: str) -> None:
    moved, unmoved = masks.moved_to(ahead(masks, ms))
    assert unmoved == {masks.instances[0].id: why}
    assert moved == masks


def test_ages_of_a_device_clock_count_from_the_arrival() -> None:
    masks = replace(moving(), clock="device", received_ns=9_000_000_000)
    moved, unmoved = masks.moved_to(9_000_000_000 + GAP_MS * 1_000_000)
    assert not unmoved
    assert moved.instances[0].box == disc(68, 36).box
    assert masks.moved_to().unmoved == {1: "too far"}  # now is years later


def test_places_move_by_the_velocity() -> None:
    spatial: dict[str, Any] = {
        "position_m": PLACE_M,
        "frame": "base",
        "velocity_mps": VELOCITY_MPS,
        "nearest_m": PLACE_M,
    }
    lost: dict[str, Any] = {"camera_position_m": PLACE_M, "points_m": bytes(12), "heights_m": (0.0, 0.1)}
    spatial["upright_centre_m"] = PLACE_M
    masks = moving(extent_centre_m=PLACE_M, extent_m=(1.0, 1.0, 1.0), **spatial, **lost)
    (moved,) = masks.moved_to(ahead(masks, 200)).masks.instances
    for place in (moved.position_m, moved.extent_centre_m, moved.nearest_m, moved.upright_centre_m):
        assert place == pytest.approx((0.2, 0.0, 0.94))
    assert (moved.camera_position_m, moved.points_m, moved.heights_m, moved.covariance_m2) == (None,) * 4
    assert moved.extent_m == (1.0, 1.0, 1.0)


def test_the_covariance_is_of_a_line_through_two_positions() -> None:
    """Draw both errors, and the acceleration in steps of a millisecond, and look where the object is then."""
    random = np.random.default_rng(1)
    ahead_ms = 200
    draws = 20_000
    speed = np.cumsum(random.normal(0, np.sqrt(1e-3), (GAP_MS + ahead_ms, draws)), axis=0)
    place = np.concatenate([np.zeros((1, draws)), np.cumsum(speed, axis=0) * 1e-3])
    seen = [place[ms] + random.normal(0, np.sqrt(VARIANCE_M2), draws) for ms in (0, GAP_MS)]
    error = seen[1] + (seen[1] - seen[0]) * ahead_ms / GAP_MS - place[GAP_MS + ahead_ms]
    spatial: dict[str, Any] = {"position_m": PLACE_M, "frame": "base", "velocity_mps": VELOCITY_MPS}
    masks = moving(covariance_m2=(VARIANCE_M2, 5e-5, 0.0, VARIANCE_M2, 0.0, VARIANCE_M2), **spatial)
    (moved,) = masks.moved_to(ahead(masks, ahead_ms)).masks.instances
    assert moved.covariance_m2 is not None
    xx, xy, xz, yy, yz, zz = moved.covariance_m2
    assert xx == yy == zz == pytest.approx(error.var(), rel=0.05)
    assert (xy, xz, yz) == pytest.approx((5e-5 * 13, 0, 0))


def test_a_client_keeps_the_masks_before_and_the_wire_stays_as_it_is() -> None:
    first = make_masks(1)
    second = make_masks(2)
    assert pack_masks(replace(second, before=first)) == pack_masks(second)
    with (
        MaskPublisher("tcp://127.0.0.1:*") as publisher,
        PerceptionClient(publisher.endpoint, "tcp://127.0.0.1:1") as client,
    ):
        wait_until(lambda: publisher.send(first) and client.latest(50) is not None)
        publisher.send(second)
        while (masks := client.latest(PATIENCE_MS)).seq != 2:
            pass
        assert (masks.before.seq, masks.before.before) == (1, None)

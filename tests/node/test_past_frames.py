"""A click on what was on the screen a while ago: camera and node are processes, the bundled weights do the work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.types import Instance, Mask, MaskFrame
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.tabletop import cut, truth

FPS = 5
BALL, MOVES_FROM = "orange ball", 130
DELAY_FRAMES = 8  # 1.5 s, also where the camera's process is late


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("past"))
    rig.environment |= {
        "SAM3_MODEL__NAME": "nano",
        "SAM3_CAMERA__FPS": str(FPS),
        # on a busy machine, all frames are stepped nevertheless, and kept for a client that is slow to ask
        "SAM3_TRANSPORT__DELIVERY": "every",
        "SAM3_TRACKER__FEATURE_CACHE_S": "100",
    }
    yield rig
    rig.close()


def true_ball(seq: int) -> Instance:
    """Return the ball on the camera's frame `seq`, the first of which is frame MOVES_FROM of the recording."""
    return next(found for found in truth()[MOVES_FROM + seq].instances if found.label == BALL)


def centre(instance: Instance) -> tuple[float, float]:
    x0, y0, x1, y1 = instance.box
    return (x0 + x1) / 2, (y0 + y1) / 2


def iou(first: Mask, second: Mask) -> float:
    one, other = first.full(), second.full()
    return float((one & other).sum() / max((one | other).sum(), 1))


def mask_of(masks: MaskFrame, object_id: int) -> Mask:
    return next(instance.mask for instance in masks.instances if instance.id == object_id)


def test_a_late_click_on_a_moving_object_gives_what_a_live_click_gave(rig: Rig) -> None:
    """Most of the ball has left the place that the second click points at."""
    rig.node()
    rig.start("camera", f"bag:{cut(rig.folder / 'ball.mcap', MOVES_FROM, len(truth()))}")
    with PerceptionClient(rig.masks, rig.control, delivery="every", timeout_ms=10000) as client:
        seen = masks_where(client, lambda masks: True, "masks")
        there = centre(true_ball(seen.seq))
        live = client.add_object(points=[there], seq=seen.seq)
        now = masks_where(client, lambda masks: masks.seq - seen.seq >= DELAY_FRAMES, "a later frame")
        late = client.add_object(points=[there], seq=seen.seq)
        assert late.segmentation
        assert late.segmentation.seq == seen.seq
        assert iou(late.segmentation.mask, true_ball(seen.seq).mask) > 0.5
        assert iou(late.segmentation.mask, true_ball(now.seq).mask) < 0.3
        both = masks_where(client, lambda masks: {live.id, late.id} <= set(ids(masks)), "both objects")
        assert iou(mask_of(both, late.id), mask_of(both, live.id)) > 0.95
        assert iou(mask_of(both, late.id), true_ball(both.seq).mask) > 0.5
        usage = client.status()["cameras"]["cam0"]
        assert usage["catching_up"] == 0
        assert usage["cached_bytes"] > usage["cached_frames"] > 0

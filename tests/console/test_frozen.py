"""Marks on pictures that stand still: the node keeps their frames, and says when it no longer has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.console_rig import CLIP_FRAMES, ConsoleRig, Page, best_iou, inner_point, iou, true_mask
from tests.support.node_rig import until

ENVIRONMENT = {
    "SAM3_CAMERA__FPS": "10",
    "SAM3_TRACKER__FEATURE_CACHE": "4",
}
FRAMES_OF_30_S = 150  # of a camera at 5 Hz
ROW = "#tracks tbody tr"


def test_clicks_long_after_the_freeze_land_on_that_frame_and_catch_up(rig: ConsoleRig, page: Page) -> None:
    """The arm has carried the ball away since, and the last two seconds of frames have been replaced 7 times."""
    while not 5 <= int(page.data("seq")) % CLIP_FRAMES <= 20:
        page.page.wait_for_timeout(50)
    seq = page.freeze()
    page.press("h")  # no previews
    page.wait("#place-hint:has-text('Marks work')")
    with rig.client() as client:

        def wait_for(frames: int) -> int:
            last_seq: int = client.status()["cameras"]["cam0"]["last_seq"]
            return last_seq if last_seq >= seq + frames else 0

        now = until(lambda: wait_for(FRAMES_OF_30_S), "frames of 30 s")
        ball, mug = true_mask(seq, "orange ball"), true_mask(seq, "red mug")
        x, y = inner_point(ball)
        assert not true_mask(now, "orange ball").full()[int(y), int(x)]
        with page.page.expect_response("**/api/add_object") as answer:
            page.click(x, y)
        found = answer.value.json()["mask"]
        assert answer.value.json()["seq"] == seq
        assert iou(box_mask(found["box"]), box_mask(ball.box)) >= 0.5
        page.wait(f"{ROW}:nth-child(1)")
        page.click(*inner_point(mug))
        page.wait(f"{ROW}:nth-child(2)")
        page.live()
        page.wait(".tile[data-frozen=false][data-masks='2']")
        second = [item.id for item in client.list_objects()][1]
    assert best_iou(rig, second, "red mug") >= 0.5


def box_mask(box: tuple[int, int, int, int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    x0, y0, x1, y1 = box
    mask = np.zeros((480, 640), np.bool_)
    mask[y0:y1, x0:x1] = True
    return mask


def test_a_mark_on_a_frame_that_is_gone_is_offered_on_the_newest(rig: ConsoleRig, page: Page) -> None:
    page.wait("#place:not([max='0'])")
    page.page.wait_for_function("() => Number(document.querySelector('#place').max) >= 30")
    newest = page.freeze()
    page.page.locator("#place").fill("2")
    page.wait("#place-hint:has-text('Too old to mark')")
    old = int(page.data("seq"))
    assert old < newest - 10
    page.click(*inner_point(true_mask(old, "red mug")))
    page.wait("#toast.shown[data-kind=error]:has-text('too old')")
    with rig.client() as client:
        assert not client.list_objects()
        page.page.locator("#toast button:has-text('newest')").click()
        page.wait("#badge[data-kind=live]")
        page.wait(ROW)
        (found,) = (item.id for item in client.list_objects())
    assert best_iou(rig, found, "red mug") >= 0.5
    page.complaints.clear()  # the browser logs the answers 400

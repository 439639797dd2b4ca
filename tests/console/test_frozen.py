"""Marks on pictures that stand still: the node keeps their frames, and says when it no longer has them."""

from __future__ import annotations

from tests.support.console_rig import CLIP_FRAMES, ConsoleRig, Page, best_iou, inner_point, true_mask
from tests.support.node_rig import until

ENVIRONMENT = {
    "SAM3_CAMERA__FPS": "10",
    "SAM3_TRACKER__FEATURE_CACHE": "4",
    "SAM3_TRACKER__FEATURE_CACHE_S": "1",
}
FRAMES_OF_30_S = 150  # of a camera at 5 Hz
BALL = "orange ball"
ROW = "#tracks tbody tr"


def test_a_click_long_after_the_freeze_lands_on_that_frame_and_catches_up(rig: ConsoleRig, page: Page) -> None:
    """The arm has carried the ball away since, and the last second of frames has been replaced 15 times."""
    while not 5 <= int(page.data("seq")) % CLIP_FRAMES <= 20:
        page.page.wait_for_timeout(50)
    seq = page.freeze()
    page.wait("#place-hint:has-text('Marks work')")
    with rig.client() as client:

        def wait_for(frames: int) -> int:
            last_seq: int = client.status()["cameras"]["cam0"]["last_seq"]
            return last_seq if last_seq >= seq + frames else 0

        now = until(lambda: wait_for(FRAMES_OF_30_S), "frames of 30 s")
        place = inner_point(true_mask(seq, BALL))
        assert not true_mask(now, BALL).full()[int(place[1]), int(place[0])]
        page.click(*place)
        page.wait(ROW)
        page.wait(".tile[data-masks='1']")
        assert int(page.data("seq")) == seq
        page.live()
        (found,) = (item.id for item in client.list_objects())
    assert best_iou(rig, found, BALL) >= 0.5


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

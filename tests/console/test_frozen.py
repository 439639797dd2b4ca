"""Marks on pictures that stand still: the node keeps their frames."""

import numpy as np

from tests.support.console_rig import CLIP_FRAMES, ConsoleRig, Page, best_iou, inner_point, true_mask
from tests.support.node_rig import until

ENVIRONMENT = {"SAM3_CAMERA__FPS": "10", "SAM3_TRACKER__FEATURE_CACHE": "4"}
FRAMES_OF_30_S = 150  # of a camera at 5 Hz
ROW = "#tracks tbody tr"


def test_clicks_long_after_the_freeze_land_on_that_frame_and_catch_up(rig: ConsoleRig, page: Page) -> None:
    """The arm has carried the ball away since, and the last two seconds of frames have been replaced 7 times."""
    while not 5 <= int(page.data("seq")) % CLIP_FRAMES <= 70:  # the ball lies still until the arm takes it
        page.page.wait_for_timeout(50)
    seq = page.freeze()
    page.press("h")  # no previews
    page.wait("#place-hint:has-text('Marks work')")
    with rig.client() as client:
        wanted = seq + FRAMES_OF_30_S
        until(lambda: client.status()["cameras"]["cam0"]["last_seq"] >= wanted, "frames of 30 s")
        ball = true_mask(seq, "orange ball")
        mug = true_mask(seq, "red mug")
        x, y = inner_point(ball)
        assert not true_mask(wanted, "orange ball").full()[int(y), int(x)]
        with page.page.expect_response("**/api/add_object") as answer:
            page.click(x, y)
        found = answer.value.json()["mask"]
        assert answer.value.json()["seq"] == seq
        np.testing.assert_allclose(found["box"], ball.box, atol=30)
        page.wait(f"{ROW}:nth-child(1)")
        page.click(*inner_point(mug))
        page.wait(f"{ROW}:nth-child(2)")
        page.live()
        page.wait(".tile[data-frozen=false][data-masks='2']")
        second = [item.id for item in client.list_objects()][1]
    assert best_iou(rig, second, "red mug") >= 0.5

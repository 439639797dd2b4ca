"""Marks on pictures that stand still, the layer of the robot in them, and a drag with Alt on them: all like this."""

import base64

import cv2
import numpy as np
import pytest

from sam3_node.bags import LabelledClip
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.types import Mask
from tests.support.console_rig import CLIP_FRAMES, ConsoleRig, Page, best_iou, inner_point, true_mask
from tests.support.node_rig import masks_where, until
from tests.support.tiny_detectors import write_tiny_sam3

pytest.importorskip("yourdfpy", reason="needs the extra robot")

BALL_LIES = range(80, 131)
"""Frames on which the ball still lies where the arm has it no more LONG frames later."""
LONG = 60
"""Frames in which the last two seconds of frames are replaced three times."""
ROW = "#tracks tbody tr"
PICTURE = """() => {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [640, 480];
    canvas.getContext("2d").drawImage(document.querySelector("#main-tile .tile canvas"), 0, 0, 640, 480);
    return canvas.toDataURL("image/png").split(",")[1];
}"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bundled recording's robot, and SAM 3's detector with random weights."""
    joints = f"ipc://{tmp_path_factory.mktemp('robot')}/joints"
    detector = tmp_path_factory.mktemp("detector")
    write_tiny_sam3(detector)
    return {
        "SAM3_CAMERA__FPS": "10",
        "SAM3_TRACKER__FEATURE_CACHE": "4",
        "SAM3_DETECTOR__KIND": "sam3-concept",
        "SAM3_DETECTOR__NAME": str(detector),
        "SAM3_CAMERA__ROBOT": joints,
        "SAM3_SPATIAL__POSES": joints,
        "SAM3_SPATIAL__CALIBRATION": str(TABLETOP.with_suffix(".toml")),
        "SAM3_ROBOT__URDF": str(TABLETOP.with_suffix(".urdf")),
        "SAM3_ROBOT__BASE": "camera",
        "SAM3_SPATIAL__MAX_POSE_GAP_MS": "1000",  # the camera plays slowly
    }


def test_clicks_long_after_the_freeze_land_on_that_frame_and_catch_up(rig: ConsoleRig, page: Page) -> None:
    """The arm has carried the ball away since, and the node has kept none of the frames for itself."""
    while int(page.data("seq")) % CLIP_FRAMES not in BALL_LIES:
        page.page.wait_for_timeout(50)
    seq = page.freeze()
    page.press("h")  # no previews
    page.wait("#place-hint:has-text('Marks work')")
    with rig.client() as client:
        wanted = seq + LONG
        until(lambda: client.status()["cameras"]["cam0"]["last_seq"] >= wanted, "many frames")
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
    page.press("h")
    assert best_iou(rig, second, "red mug") >= 0.5


def freeze_robot(rig: ConsoleRig, page: Page) -> tuple[int, Mask]:
    """Freeze a picture on which the robot is large. Return its seq and the robot's mask."""
    seen: dict[int, Mask | None] = {}
    with rig.client() as client:
        while True:
            for _ in range(5):
                masks = masks_where(client, lambda masks: True, "masks")
                seen[masks.seq] = masks.robot_mask
            seq = page.freeze()
            while masks.seq < seq:
                masks = masks_where(client, lambda masks: True, "masks")
                seen[masks.seq] = masks.robot_mask
            if (robot := seen.get(seq)) is not None and robot.area > 4000:
                return seq, robot
            page.live()


def test_the_robot_is_painted_where_the_node_sees_it(rig: ConsoleRig, page: Page) -> None:
    """No object is tracked: nothing else is painted."""
    seq, robot = freeze_robot(rig, page)
    png = base64.b64decode(page.read(PICTURE))
    shown = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR).astype(int)
    image = LabelledClip.load(TABLETOP).image(seq % CLIP_FRAMES)
    painted = np.abs(shown - image).max(axis=-1) > 12
    inside = robot.full()
    assert painted[inside].mean() > 0.25  # hatched
    assert painted[~cv2.dilate(inside.astype(np.uint8), np.ones((5, 5), np.uint8)).astype(bool)].mean() < 0.01


def test_drags_with_alt_show_what_to_look_for_and_what_not(rig: ConsoleRig, page: Page) -> None:
    page.freeze()
    page.drag((100, 100, 200, 180), "Alt")
    page.wait("#toast.shown:has-text('Type a name first')")
    page.page.locator("#name").fill("washer")
    page.drag((100, 100, 200, 180), "Alt")
    page.wait("#toast.shown:has-text('Looks for washer: all that is like this box.')")
    page.page.locator("#name").fill("")
    page.drag((300, 200, 420, 300), "Alt", "Shift")
    page.wait("#toast.shown:has-text('all that is not like this box.')")
    with rig.client() as client:
        status = client.status()
    assert status["prompts"] == ["washer"]
    assert status["exemplars"] == {"washer": [1, 0]}
    assert page.rows() == []
    page.wait("#events li:has-text('Looks for all that is like a box.')")

"""Tests of the console with a real browser, camera and node: what a person sees, clicks and types."""

import json
from typing import Any

import pytest

from sam3_node.types import MaskFrame
from tests.support.console_rig import (
    PAINTED,
    ConsoleRig,
    Page,
    best_iou,
    find_serious,
    inner_point,
    iou,
    is_in_view,
    preview_of,
    true_mask,
)
from tests.support.node_rig import masks_where, until
from tests.support.repeats import repetitions

MIN_IOU = 0.5  # the limit of the bundled weights
ROW = "#tracks tbody tr"
NAMES = ("red mug", "green bottle", "yellow box", "blue can")


def read_area(page: Page) -> int:
    return int(page.page.locator(ROW).get_attribute("data-area"))


def add_mug(page: Page) -> tuple[int, int]:
    """Freeze the picture and click the mug on it. Return the seq of the picture and the object's id."""
    seq = page.freeze()
    page.click(*inner_point(true_mask(seq, "red mug")))
    page.wait(ROW)
    (found,) = page.rows()
    return seq, found


def mug_is_found(masks: MaskFrame) -> bool:
    """Return True if an object by that name lies on the mug. A name may find others beside it, which come and go."""
    truth = true_mask(masks.seq, "red mug").full()
    return any(iou(item.mask.full(), truth) >= MIN_IOU for item in masks.instances if item.label == "red mug")


def go_live(page: Page, found: int) -> None:
    """Go back to live, and wait until the object has caught up."""
    page.live()
    page.wait(".tile[data-masks='1']")
    page.wait(f"{ROW}[data-id='{found}']")


def test_a_click_adds_the_object_that_was_on_the_screen(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    assert best_iou(rig, found, "red mug") >= MIN_IOU


def test_a_drag_adds_the_object_in_the_box(rig: ConsoleRig, page: Page) -> None:
    seq = page.freeze()
    while not is_in_view(seq, "green bottle"):
        page.live()
        seq = page.freeze()
    page.drag(true_mask(seq, "green bottle").box)
    page.wait(ROW)
    (found,) = page.rows()
    assert best_iou(rig, found, "green bottle") >= MIN_IOU


def test_a_negative_point_shrinks_the_mask(page: Page) -> None:
    seq, found = add_mug(page)
    before = read_area(page)
    x0, y0, x1, y1 = true_mask(seq, "red mug").box
    page.click((x0 + x1) / 2, y0 + 0.85 * (y1 - y0), shift=True)
    page.wait("#toast.shown:has-text('Corrected')")
    page.wait(f"{ROW}:not([data-area='{before}'])")
    assert page.rows() == [found]
    assert read_area(page) < before


def test_the_live_picture_shows_what_the_click_added(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    go_live(page, found)
    page.wait(f"{ROW} td[data-state='sure'], {ROW} td[data-state='doubtful']")


def test_the_keyboard_marks_an_object_and_removes_it(page: Page) -> None:
    page.freeze()
    page.page.locator("#main-tile .overlay").focus()
    page.press("ArrowUp")
    page.press("b")
    for _ in range(6):
        page.press("Control+ArrowRight" if _ % 2 else "Control+ArrowDown")
    page.press("Enter")
    page.wait(ROW)
    page.press("Escape")
    page.press("Delete")
    page.wait_gone(ROW)


def test_rename_gives_the_label_that_everybody_sees_and_events_name(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    go_live(page, found)
    page.press("F2")
    page.page.locator("#label").fill("my mug")
    page.press("Enter")
    page.wait(f"{ROW} td:has-text('my mug')")
    with rig.client() as client:
        assert [(item.id, item.label) for item in client.list_objects()] == [(found, "my mug")]
    page.press("Delete")
    page.page.locator("#events li:has-text('Removed my mug.') button").first.click()
    page.wait("#toast.shown:has-text('Click my mug')")
    page.page.locator("#toast button").click()


def test_reset_asks_first(page: Page) -> None:
    go_live(page, add_mug(page)[1])
    page.press("x")
    page.wait("#reset-dialog[open]")
    page.press("Escape")
    page.wait_gone("#reset-dialog[open]")
    assert len(page.rows()) == 1
    page.press("x")
    page.page.locator("#reset-dialog button[value=yes]").click()
    page.wait_gone(ROW)


def test_pause_and_resume_show_and_change_the_node(page: Page) -> None:
    page.press("p")
    page.wait("#pause[aria-pressed=true]")
    page.wait("#badge[data-kind=wait]")
    page.press("p")
    page.wait("#pause[aria-pressed=false]")
    page.wait("#badge[data-kind=live]")


def test_a_typed_name_finds_the_object_and_the_button_ends_the_search(rig: ConsoleRig, page: Page) -> None:
    page.press("/")
    page.page.keyboard.type("red")
    page.wait("#words option[value='red mug']", state="attached")
    page.page.keyboard.type(" mug")
    page.press("Enter")
    page.wait("#names li")
    page.wait(ROW)
    assert page.page.locator("#tracks tbody td").nth(1).inner_text() == "red mug"
    with rig.client() as client:
        masks_where(client, mug_is_found, "a mask of the mug")
    page.page.locator("#names button").click()
    page.wait_gone(ROW)


def test_a_name_from_the_list_leaves_the_limits_of_the_others(rig: ConsoleRig, page: Page) -> None:
    with rig.client() as client:
        client.set_prompts(["green bottle"], most={"green bottle": 1}, priorities={"green bottle": "low"})
        page.wait("#names li:has-text('green bottle')")
        page.page.locator("#choose").click()
        page.page.locator("#vocabulary button:text-is('red mug')").click()
        page.wait("#vocabulary button[aria-pressed=true]:text-is('red mug')")
        page.press("Escape")
        page.wait("#names li:has-text('red mug')")
        limits = client.status()["prompt_limits"]
        assert limits["most"] == {"green bottle": 1}
        assert limits["priorities"] == {"green bottle": "low"}


def test_an_unknown_name_is_refused_with_what_the_node_says(page: Page) -> None:
    page.press("/")
    page.page.keyboard.type("xylophone of glass")
    page.press("Enter")
    page.wait("#toast.shown[data-kind=error]")
    page.complaints.clear()  # the browser logs the answer 400


def test_scrubbing_goes_back_and_live_comes_back(page: Page) -> None:
    page.wait("#place:not([max='0'])")
    newest = page.freeze()
    page.press("[")
    page.wait(f"#main-tile .tile:not([data-seq='{newest}'])")
    assert int(page.data("seq")) < newest
    page.press("l")
    page.wait("#badge[data-kind=live]")


def test_an_episode_is_begun_kept_and_discarded(rig: ConsoleRig, page: Page) -> None:
    page.page.locator("#episode").click()
    page.wait("#episode[aria-pressed=true]:has-text('Keep episode')")
    with rig.client() as client:
        assert client.status()["episode"]["episode"] == 0
    page.page.locator("#episode").click()
    page.wait("#episode[aria-pressed=false]:has-text('Begin episode')")
    page.page.locator("#episode").click()
    page.wait("#discard:visible")
    page.page.locator("#discard").click()
    page.wait("#toast.shown:has-text('discarded')")
    page.wait("#episode[aria-pressed=false]")
    with rig.client() as client:
        assert client.status()["episode"] is None


def test_a_snapshot_and_a_recording_are_written(rig: ConsoleRig, page: Page) -> None:
    with page.page.expect_download() as download:
        page.press("s")
    assert download.value.suggested_filename.endswith(".png")
    page.wait("#toast.shown:has-text('-masks.png')")
    page.press("c")
    page.wait("#record[aria-pressed=true]")
    page.page.wait_for_timeout(1000)
    page.press("c")
    page.wait("#toast.shown:has-text('recorded')")
    (written,) = (rig.folder / "recordings").glob("*.mcap")
    assert written.stat().st_size > 10_000


def test_no_request_leaves_the_host(rig: ConsoleRig, page: Page) -> None:
    page.page.reload()
    page.wait('body[data-connected="yes"]')
    own = (rig.url, rig.url.replace("http:", "ws:"), f"blob:{rig.url}")
    assert len(page.requests) > 8
    assert not [url for url in page.requests if not url.startswith(own)]


def test_the_preview_covers_the_object_under_the_pointer_and_ends_while_it_rests(page: Page) -> None:
    seq, preview = preview_of(page, "red mug")
    assert iou(preview, true_mask(seq, "red mug").full()[::4, ::4]) > MIN_IOU
    page.page.wait_for_function(f"() => !({PAINTED})().some((alpha) => alpha)")
    page.page.mouse.move(1, 1)


def test_a_double_click_on_a_live_picture_makes_one_object(rig: ConsoleRig, page: Page) -> None:
    place = page.to_page(*inner_point(true_mask(int(page.data("seq")), "red mug")))
    page.page.mouse.dblclick(*place)
    page.wait("#toast.shown:has-text('Added')")
    page.page.wait_for_timeout(600)  # longer than a double click: the next one is another
    page.page.mouse.click(*place)
    page.wait("#toast.shown:has-text('Corrected')")
    with rig.client() as client:
        assert len(client.list_objects()) == 1


def test_no_label_covers_another_object(rig: ConsoleRig, page: Page) -> None:
    published: dict[int, MaskFrame] = {}
    with rig.client() as client:
        client.on_masks(lambda masks: published.update({masks.seq: masks}))
        client.set_prompts(NAMES, most=dict.fromkeys(NAMES, 1))
        page.wait("#main-tile .tile[data-masks='4']")
        for _ in range(repetitions(3, 6)):
            seq = page.freeze()
            masks = until(lambda seq=seq: published.get(seq), f"the masks of frame {seq}")
            shown = {item.id: item.mask.full() for item in masks.instances if item.area}
            labels = {own: [*map(round, rect)] for own, *rect in json.loads(page.data("labels"))}
            assert labels.keys() >= shown.keys()
            for own, (x0, y0, x1, y1) in labels.items():
                assert (x1 - x0) * (y1 - y0) < 0.02 * 640 * 480
                others = [known for known, mask in shown.items() if mask[y0:y1, x0:x1].any()]
                assert not {*others} - {own}, seq
            page.picture("console-dark.jpg")
            page.live()
            page.page.wait_for_timeout(700)  # the arm moves on


@pytest.mark.parametrize(("device", "width", "height"), [("tablet", 820, 1180), ("phone", 390, 844)])
def test_a_touch_screen_shows_the_picture_first_and_says_tap(
    browser: Any, rig: ConsoleRig, page: Page, device: str, width: int, height: int
) -> None:
    size = {"width": width, "height": height}
    touched = Page(browser, rig.url, viewport=size, color_scheme="light", has_touch=True, is_mobile=True)
    touched.wait("#main-tile .tile[data-masks='0']")
    assert touched.page.locator("#main-tile").bounding_box()["y"] < 100
    assert touched.page.locator("#freeze").bounding_box()["y"] > height - 80
    assert touched.page.locator("#marks-hint").inner_text().startswith("Tap")
    seq = touched.freeze()
    touched.page.touchscreen.tap(*touched.to_page(*inner_point(true_mask(seq, "red mug"))))
    touched.wait(ROW)
    labels = "^='[['" if device == "tablet" else "='[]'"  # on a phone, the list names the objects
    touched.wait(f"#main-tile .tile[data-labels{labels}]")
    touched.picture(f"console-{device}.jpg")
    assert not find_serious(touched)
    assert not touched.complaints
    touched.close()


def test_axe_finds_nothing_serious(page: Page) -> None:
    add_mug(page)
    page.wait("#toast.shown button")
    for theme in ("dark", "light"):
        assert not find_serious(page), theme
        for surface in ("#help", "#choose"):
            page.page.locator(surface).click()
            page.wait("dialog[open]")
            assert not find_serious(page), (theme, surface)
            page.press("Escape")
        page.press("t")


def test_a_killed_node_is_told_and_the_page_heals_with_new_ids(rig: ConsoleRig, page: Page) -> None:
    add_mug(page)
    with page.page.expect_response("**/api/pin_frame"):
        page.live()
    node = rig.processes[-1]
    node.kill()
    page.wait('body[data-connected="no"]')
    page.wait("#notice:has-text('node')")
    page.wait("#main-tile .tile[data-masks='']")  # the camera goes on
    rig.node()
    page.wait('body[data-connected="yes"]')
    page.wait("#main-tile .tile[data-masks='0']")
    _, found = add_mug(page)
    assert found == 1


def test_a_click_goes_to_the_camera_whose_picture_it_was_made_on(rig: ConsoleRig, page: Page) -> None:
    """The last test of this file: the second camera's tile stays on the page."""
    side = rig.start(
        "camera", "scene:shapes?width=320&height=240", TRANSPORT__FRAMES=rig.frames[1], CAMERA__NAME="side"
    )
    page.wait("#main-tile .tile[data-camera='cam0'][data-masks='0']")
    small = page.wait("#tiles .tile[data-camera='side'][data-masks='0'] .overlay")
    add_mug(page)
    page.live()
    small.click()
    page.wait("#main-tile .tile[data-camera='side']")
    page.wait("#tiles .tile[data-camera='cam0']")
    assert page.rows() == []
    page.freeze()
    page.click(160, 120, size=(240, 320))
    page.wait(ROW)
    side.kill()
    with rig.client() as client:
        assert sorted(item.camera for item in client.list_objects()) == ["cam0", "side"]
    page.live()
    page.press("o")
    page.wait("#main-tile .tile[data-camera='cam0'][data-masks='1']")

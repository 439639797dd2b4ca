"""Tests of the console with a real browser, camera and node: what a person sees, clicks and types."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sam3_node.types import MaskFrame
from tests.support.console_rig import (
    PAINTED,
    SLOW_CLOCK,
    ConsoleRig,
    HeldPreviews,
    Page,
    best_iou,
    find_serious,
    inner_point,
    iou,
    is_in_view,
    painted,
    true_mask,
)
from tests.support.node_rig import masks_where

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


def hover(page: Page, x: float, y: float) -> None:
    page.page.mouse.move(*page.to_page(x, y))


def go_live(page: Page, found: int) -> None:
    """Go back to live, and wait until the object has caught up."""
    page.live()
    page.wait(".tile[data-masks='1']")
    page.wait(f"{ROW}[data-id='{found}']")


def test_a_click_adds_the_object_that_was_on_the_screen(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    assert best_iou(rig, found, "red mug") >= MIN_IOU


def test_a_drag_adds_the_object_in_the_box(rig: ConsoleRig, page: Page) -> None:
    while not is_in_view(seq := page.freeze(), "green bottle"):
        page.live()
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


def test_rename_gives_the_label_that_everybody_sees(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    go_live(page, found)
    page.press("F2")
    page.page.locator("#label").fill("my mug")
    page.press("Enter")
    page.wait(f"{ROW} td:has-text('my mug')")
    with rig.client() as client:
        assert [(item.id, item.label) for item in client.list_objects()] == [(found, "my mug")]


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


def test_a_name_more_leaves_the_limits_of_the_others(rig: ConsoleRig, page: Page) -> None:
    with rig.client() as client:
        client.set_prompts(["green bottle"], most={"green bottle": 1}, priorities={"green bottle": "low"})
        page.wait("#names li:has-text('green bottle')")
        page.press("/")
        page.page.keyboard.type("red mug")
        page.press("Enter")
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


def test_a_recording_is_written(rig: ConsoleRig, page: Page) -> None:
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


@pytest.fixture(scope="module")
def hovering(browser: Any, rig: ConsoleRig) -> Iterator[Page]:
    page = Page(browser, rig.url)
    page.context.add_init_script(SLOW_CLOCK)
    page.page.reload()
    yield page
    page.close()


@pytest.fixture
def previewed(rig: ConsoleRig, hovering: Page) -> Iterator[Page]:
    """A live page without objects, with the pointer beside the picture."""
    with rig.client() as client:
        client.reset()
    hovering.page.mouse.move(1, 1)
    hovering.press("l")
    hovering.wait('#main-tile .tile[data-masks="0"]')
    yield hovering
    hovering.page.unroute_all()
    assert not hovering.complaints


def test_the_preview_covers_the_object_under_the_pointer(previewed: Page) -> None:
    seq = previewed.freeze()
    mask = true_mask(seq, "red mug")
    hover(previewed, *inner_point(mask))
    previewed.page.wait_for_function(f"() => ({PAINTED})().some((alpha) => alpha)")
    assert iou(painted(previewed), mask.full()[::4, ::4]) > 0.5
    previewed.page.mouse.move(1, 1)
    assert not painted(previewed).any()


def test_the_newest_place_supersedes_those_before(previewed: Page) -> None:
    """While the node answers for one place, the pointer passes several; only the last is held for."""
    seq = previewed.freeze()
    held = HeldPreviews(previewed)
    places = [(60.0, 60.0), (80.0, 60.0), (100.0, 60.0), inner_point(true_mask(seq, "red mug"))]
    hover(previewed, *places[0])
    held.wait(1)
    for place in places[1:]:
        hover(previewed, *place)
    held.release(0)
    held.wait(2)
    held.release(1)
    np.testing.assert_allclose(held.points(), [places[0], places[-1]], atol=2)
    previewed.page.wait_for_function(f"() => ({PAINTED})().some((alpha) => alpha)")
    assert len(held.routes) == 2


def test_no_preview_stays_when_the_pointer_has_left(previewed: Page) -> None:
    seq = previewed.freeze()
    held = HeldPreviews(previewed)
    hover(previewed, *inner_point(true_mask(seq, "red mug")))
    held.wait(1)
    previewed.page.mouse.move(1, 1)
    held.release(0)
    hover(previewed, 60, 60)  # the next request comes after the answer to the first was used
    held.wait(2)
    assert not painted(previewed).any()
    previewed.page.mouse.move(1, 1)
    held.release(1)


@pytest.mark.parametrize("area", [0.9, 0.3])
def test_a_preview_of_most_of_the_picture_is_not_shown(previewed: Page, area: float) -> None:
    seq = previewed.freeze()
    high = int(480 * area)
    bits = base64.b64encode(b"\xff" * (high * 640 // 8)).decode()
    mask = {"size": [480, 640], "box": [0, 0, 640, high], "area": 640 * high, "bits": bits}
    previewed.page.route("**/api/segment", lambda route: route.fulfill(json={"seq": seq, "mask": mask}))
    with previewed.page.expect_response("**/api/segment"):
        hover(previewed, 60, 60)
    with previewed.page.expect_response("**/api/segment"):  # after the answer to the first was used
        hover(previewed, 80, 60)
    assert painted(previewed).any() == (area < 0.5)
    previewed.page.mouse.move(1, 1)


def test_a_preview_on_a_live_picture_vanishes_under_a_pointer_that_rests(previewed: Page) -> None:
    hover(previewed, *inner_point(true_mask(int(previewed.data("seq")), "red mug")))
    previewed.page.wait_for_function(f"() => ({PAINTED})().some((alpha) => alpha)")
    previewed.page.wait_for_function(f"() => !({PAINTED})().some((alpha) => alpha)")
    previewed.page.mouse.move(1, 1)


def test_a_double_click_on_a_live_picture_makes_one_object(rig: ConsoleRig, page: Page) -> None:
    place = page.to_page(*inner_point(true_mask(int(page.data("seq")), "red mug")))
    page.page.mouse.dblclick(*place)
    page.wait("#toast.shown:has-text('Added')")
    page.page.wait_for_timeout(600)  # longer than a double click: the next one is another
    page.page.mouse.click(*place)
    page.wait("#toast.shown:has-text('Corrected')")
    with rig.client() as client:
        assert len(client.list_objects()) == 1


@pytest.fixture
def published(rig: ConsoleRig, page: Page) -> Iterator[dict[int, MaskFrame]]:
    """All masks of the node by seq, while it looks for four names."""
    found: dict[int, MaskFrame] = {}
    with rig.client() as client:
        client.on_masks(lambda masks: found.update({masks.seq: masks}))
        client.set_prompts(NAMES, most=dict.fromkeys(NAMES, 1))
        page.wait("#main-tile .tile[data-masks='4']")
        yield found


def test_no_label_covers_another_object(page: Page, published: dict[int, MaskFrame]) -> None:
    for _ in range(8):
        seq = page.freeze()
        labels = {label[0]: [*map(round, label[1:])] for label in json.loads(page.data("labels"))}
        shown = {item.id: item.mask.full() for item in published[seq].instances if item.area}
        assert labels.keys() >= shown.keys()
        for own, (x0, y0, x1, y1) in labels.items():
            assert (x1 - x0) * (y1 - y0) < 0.02 * 640 * 480
            others = [mask[y0:y1, x0:x1].any() for known, mask in shown.items() if known != own]
            assert not any(others), (seq, own)
        page.live()
        page.page.wait_for_timeout(700)  # the arm moves on


def test_a_snapshot_has_the_pixels_of_the_frame_and_the_ids(
    page: Page, published: dict[int, MaskFrame], tmp_path: Path
) -> None:
    downloads: list[Any] = []
    page.page.on("download", lambda download: downloads.append(download))
    seq = page.freeze()
    page.press("s")
    page.wait(f"#toast.shown:has-text('cam0-{seq}-masks.png')")
    while len(downloads) < 2:
        page.page.wait_for_timeout(50)
    for download in downloads:
        download.save_as(tmp_path / download.suggested_filename)
    picture = Image.open(tmp_path / f"cam0-{seq}.png")
    ids = np.array(Image.open(tmp_path / f"cam0-{seq}-masks.png"))
    assert (picture.size, ids.shape) == ((640, 480), (480, 640))
    expected = np.zeros((480, 640), np.uint8)
    for item in sorted(published[seq].instances, key=lambda item: -item.area):
        expected[item.mask.full()] = item.id
    np.testing.assert_array_equal(ids, expected)


def test_names_are_chosen_from_what_the_node_knows(page: Page) -> None:
    page.page.locator("#choose").click()
    page.page.locator("#filter").fill("red mug")
    page.page.locator("#vocabulary button").first.click()
    page.wait("#vocabulary button[aria-pressed=true]:has-text('red mug')")
    page.press("Escape")
    page.wait("#names li:has-text('red mug')")


def test_a_removed_object_can_be_added_again_from_the_events(rig: ConsoleRig, page: Page) -> None:
    _, found = add_mug(page)
    go_live(page, found)
    with rig.client() as client:
        client.rename_object(found, "my mug")
        page.wait(f"{ROW} td:has-text('my mug')")
        client.remove_object(found)
        page.page.locator("#events li:has-text('Removed my mug.') button").first.click()
        page.wait("#toast.shown:has-text('Click my mug')")
        seq = page.freeze()
        page.click(*inner_point(true_mask(seq, "red mug")))
        page.wait(f"{ROW} td:has-text('my mug')")
        assert [item.label for item in client.list_objects()] == ["my mug"]


def test_a_lost_object_is_told_and_may_be_found_again(page: Page) -> None:
    told = page.read("""async () => {
        const { Watch } = await import("./static/messages.js");
        const told = [];
        const watch = new Watch(({ kind, id }) => told.push([kind, id]));
        const see = (now, ...areas) => watch.see("cam0", { epoch: 1, instances:
            areas.map((area, id) => ({ id, label: "cup", area, state: area ? "tracked" : "occluded" })) }, now);
        see(0, 9, 9, 0);  // object 2 was never seen
        see(100, 0, 9, 0);
        see(2000, 0, 9, 0);
        see(5000, 0, 9, 0);
        see(9000, 0, 9, 0);
        see(9100, 9, 9, 0);
        return told;
    }""")
    assert told == [["lost", 0], ["found", 0]]


def test_a_phone_shows_the_picture_first_and_says_tap(browser: Any, rig: ConsoleRig, page: Page) -> None:
    phone = Page(browser, rig.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    phone.wait("#main-tile .tile[data-masks='0']")
    assert phone.page.locator("#main-tile").bounding_box()["y"] < 60
    assert phone.page.locator("#freeze").bounding_box()["y"] > 780
    assert phone.page.locator("#marks-hint").inner_text().startswith("Tap")
    seq = phone.freeze()
    phone.page.touchscreen.tap(*phone.to_page(*inner_point(true_mask(seq, "red mug"))))
    phone.wait(ROW)
    assert phone.data("labels") == "[]"  # the list names the objects
    assert not find_serious(phone)
    assert not phone.complaints
    phone.close()


def test_axe_finds_nothing_serious(page: Page) -> None:
    add_mug(page)
    page.wait("#toast.shown button")
    for theme in ("dark", "light"):
        assert not find_serious(page), theme
        for surface in ("#help", "#choose"):
            page.page.locator(surface).click()
            assert page.page.locator("dialog[open]").is_visible()
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

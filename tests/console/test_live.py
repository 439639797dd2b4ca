"""Tests of the console with a real browser, camera and node: what a person sees, clicks and types."""

from __future__ import annotations

from tests.support.console_rig import ConsoleRig, Page, best_iou, inner_point, true_mask

MIN_IOU = 0.5  # the limit of the bundled weights


def test_a_click_adds_the_object_that_was_on_the_screen(rig: ConsoleRig, page: Page) -> None:
    seq = page.freeze()
    page.click(*inner_point(true_mask(seq, "red mug")))
    page.wait("#tracks tbody tr", state="attached")
    (found,) = page.rows()
    assert best_iou(rig, found, "red mug") >= MIN_IOU


def test_a_drag_adds_the_object_in_the_box(rig: ConsoleRig, page: Page) -> None:
    seq = page.freeze()
    page.drag(true_mask(seq, "green bottle").box)
    page.wait("#tracks tbody tr", state="attached")
    (found,) = page.rows()
    assert best_iou(rig, found, "green bottle") >= MIN_IOU


def test_a_typed_name_finds_the_object_and_the_button_removes_it(rig: ConsoleRig, page: Page) -> None:
    page.press("/")
    page.page.keyboard.type("red")
    page.wait("#words option[value='red mug']", state="attached")
    page.page.keyboard.type(" mug")
    page.press("Enter")
    page.wait("#names li")
    page.wait("#tracks tbody tr")
    (found,) = page.rows()
    assert page.page.locator("#tracks tbody td").nth(1).inner_text() == "red mug"
    assert best_iou(rig, found, "red mug") >= MIN_IOU
    page.page.locator("#names button").click()
    page.wait_until("!document.querySelector('#tracks tbody tr')")

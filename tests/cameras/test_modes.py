"""The choice of a camera's mode."""

from __future__ import annotations

import pytest

from sam3_node.cameras.camera_source import Mode, choose_mode

USB3 = [
    Mode(width, height, fps, form)
    for width, height, rates in ((1920, 1080, (30, 15)), (1280, 720, (30, 15)), (640, 480, (60, 30, 15)))
    for fps in rates
    for form in ("rgb8", "bgr8")
]
USB2 = [Mode(640, 480, 15, "rgb8"), Mode(640, 480, 6, "rgb8"), Mode(424, 240, 30, "rgb8")]


@pytest.mark.parametrize(
    ("modes", "wanted", "expected"),
    [
        (USB3, (640, 480, 30), (640, 480, 30)),
        (USB3, (640, 480, 20), (640, 480, 30)),
        (USB3, (640, 480, 90), (640, 480, 60)),
        (USB3, (700, 400, 30), (1280, 720, 30)),
        (USB3, (4000, 3000, 5), (1920, 1080, 15)),
        (USB3, (1280, 720, 60), (1280, 720, 30)),
        (USB2, (640, 480, 30), (640, 480, 15)),
        (USB2, (1280, 720, 30), (640, 480, 15)),
    ],
)
def test_the_nearest_mode_is_chosen(
    modes: list[Mode], wanted: tuple[int, int, float], expected: tuple[int, int, float]
) -> None:
    chosen = choose_mode(modes, Mode(*wanted, ""), ("bgr8", "rgb8"))
    assert chosen[:3] == expected


def test_the_first_format_is_preferred_and_an_unknown_one_is_none() -> None:
    wanted = Mode(640, 480, 30, "")
    for forms in (("bgr8", "rgb8"), ("rgb8", "bgr8")):
        chosen = choose_mode(USB3, wanted, forms)
        assert chosen.form == forms[0]
    assert choose_mode(USB3, wanted, ("y16",)) is None
    assert str(USB2[0]) == "640x480 at 15 fps, rgb8"

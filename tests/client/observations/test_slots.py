"""Tests of the slots: which object is in which, at which size, how old, and whether a policy may act on it."""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.client import PerceptionClient
from sam3_node.client.observations import FIELDS, MAX_AGE_S, ObjectSlots
from sam3_node.client.observations.slots import fit_mask
from sam3_node.errors import MissingExtraError, NodeRestarted, PolicyError, WireError
from sam3_node.transport import MaskPublisher
from sam3_node.types import NANOSECONDS, Mask, MaskFrame, Shed
from tests.support.observations import T0, Client, make_frame, make_instance
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses

SIZE = (48, 64)


def seconds(later_s: float) -> int:
    return T0 + round(later_s * NANOSECONDS)


def ids_after(slots: ObjectSlots, *frames: MaskFrame) -> list[int]:
    for frame in frames:
        observed = slots.observe(frame, T0)
    return observed.ids.tolist()


def test_an_object_keeps_its_slot_while_others_come_and_go() -> None:
    slots = ObjectSlots(["mug", "bottle", "bottle"], SIZE)
    mug, first, second, third = (
        make_instance(id, label) for id, label in enumerate(("mug", *["bottle"] * 3), 1)
    )
    assert ids_after(slots, make_frame(second, mug, first)) == [1, 2, 3]
    assert ids_after(slots, make_frame(second)) == [0, 0, 3]
    assert ids_after(slots, make_frame(second, third)) == [0, 4, 3]
    assert ids_after(slots, make_frame(second, third, first)) == [0, 4, 3]
    assert slots.observe(now_ns=T0).without_slot == 1


def test_a_slot_for_any_label_takes_what_no_name_takes() -> None:
    slots = ObjectSlots(["*", "mug"], SIZE)
    assert ids_after(slots, make_frame(make_instance(1, "mug"), make_instance(2, "other"))) == [2, 1]
    assert ids_after(slots, make_frame(make_instance(1, "cup"), make_instance(2, "other"))) == [2, 0]
    assert slots.observe(now_ns=T0).without_slot == 1
    assert ids_after(ObjectSlots(["mug"], SIZE), make_frame(make_instance(2, "other"))) == [0]


def test_ids_of_another_epoch_are_new_objects() -> None:
    slots = ObjectSlots(["bottle", "bottle"], SIZE)
    old = make_frame(make_instance(1, "bottle"), make_instance(2, "bottle"))
    assert ids_after(slots, old) == [1, 2]
    assert ids_after(slots, replace(make_frame(make_instance(2, "bottle")), epoch=8)) == [2, 0]
    assert slots.observe(now_ns=T0).restarts == 1


def test_masks_of_another_camera_are_refused() -> None:
    slots = ObjectSlots(["mug"], SIZE)
    slots.observe(make_frame(camera="left"))
    with refuses(PolicyError, field=("left", "right")):
        slots.observe(make_frame(camera="right"))


def test_a_stale_mask_is_blank_and_says_so() -> None:
    slots = ObjectSlots(["mug", "fork"], SIZE, max_age_s=0.5)
    before = slots.observe(now_ns=T0)
    assert before.stale.all()
    assert before.refusal("mug") == "mug: no masks have come yet"
    frame = make_frame(make_instance(1, "mug"))
    fresh = slots.observe(frame, seconds(0.4))
    assert fresh.usable.tolist() == [True, False]
    assert (fresh.refusal("mug"), fresh.refusal()) == (None, "fork: not tracked")
    old = slots.observe(None, seconds(0.6))
    assert old.stale.all()
    assert not old.usable.any()
    assert not any(array.any() for array in (old.masks, old.boxes, old.visible))
    assert old.ids.tolist() == [1, 0]
    np.testing.assert_allclose(old.ages_s, 0.6, atol=1e-6)
    assert old.refusal("mug") == "mug: stale: 0.60 s old, more than 0.5 s"
    assert slots.observe(now_ns=seconds(9999)).ages_s.tolist() == [MAX_AGE_S] * 2


def test_masks_from_the_future_are_stale() -> None:
    """The clock of the node's machine is ahead, so that no age is known."""
    slots = ObjectSlots(["mug"], SIZE)
    ahead = slots.observe(make_frame(make_instance(1, "mug")), seconds(-1))
    assert ahead.ages_s.tolist() == [MAX_AGE_S]
    assert mentions(ahead.refusal() or "", "clock")
    assert slots.observe(now_ns=seconds(-0.05)).ages_s.tolist() == [0]


def test_an_object_that_was_not_tracked_on_a_frame_ages_alone() -> None:
    slots = ObjectSlots(["mug", "fork"], SIZE, max_age_s=0.5)
    slots.observe(make_frame(make_instance(1, "mug"), make_instance(2, "fork")))
    later = replace(
        make_frame(make_instance(1, "mug")), capture_ns=seconds(0.4), shed=Shed(level=2, held=(2,))
    )
    observed = slots.observe(later, seconds(0.45))
    np.testing.assert_allclose(observed.ages_s, [0.05, 0.45], atol=1e-6)
    assert observed.usable.all()
    observed = slots.observe(None, seconds(0.6))
    assert observed.usable.tolist() == [True, False]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"doubtful": True, "confidence": 0.31}, "mug: doubtful: confidence 0.31, or not confirmed yet"),
        (
            {"doubtful": True, "name_confidence": 0.4},
            "mug: doubtful: confidence 0.90, of its name 0.40, or not confirmed yet",
        ),
        ({"state": "tentative"}, "mug: doubtful: confidence 0.90, or not confirmed yet"),
        ({"state": "occluded", "mask": Mask.empty((96, 128)), "confidence": None}, "mug: not in view"),
    ],
)
def test_a_policy_can_refuse(changes: dict[str, Any], reason: str) -> None:
    slots = ObjectSlots(["mug"], SIZE)
    observed = slots.observe(make_frame(replace(make_instance(1, "mug"), **changes)), T0)
    assert observed.refusal("mug") == reason
    assert not observed.usable.any()
    assert observed.tracked.all()


@pytest.mark.parametrize("most", [1, {"mug": 1}])
def test_two_sure_objects_where_one_was_asked_are_refused(most: Any) -> None:
    slots = ObjectSlots(["mug", "fork"], SIZE, most=most)
    mug, ball, fork = (make_instance(id, label) for id, label in ((3, "mug"), (7, "mug"), (8, "fork")))
    both = slots.observe(make_frame(mug, ball, fork), T0)
    assert both.usable.tolist() == [False, True]
    for told in ("expected at most 1 'mug'", "object 3 'mug'", "object 7 'mug'"):
        assert told in both.refusal("mug")
    assert both.refusal("fork") is None
    assert not both.vector().reshape(2, len(FIELDS))[0, FIELDS.index("usable")]
    for other in (
        replace(ball, doubtful=True),
        replace(ball, state="tentative"),
        replace(ball, label="ball"),
    ):
        assert slots.observe(make_frame(mug, other, fork), T0).usable.all()
    assert ObjectSlots(["mug"], SIZE).observe(make_frame(mug, ball), T0).refusal() is None  # no limit


def test_a_limit_that_fits_no_slot_is_refused() -> None:
    for most in ({"cup": 1}, {"*": 1}, 0, True, {"mug": 1.5}):
        with refuses(PolicyError, field="most"):
            ObjectSlots(["mug", "*"], SIZE, most=most)
    assert ObjectSlots(["mug", "*"], SIZE, most=2).most == {"mug": 2}


def test_one_usable_object_of_a_name_is_enough() -> None:
    slots = ObjectSlots(["mug", "mug"], SIZE)
    doubtful = replace(make_instance(1, "mug"), doubtful=True, confidence=0.2)
    assert slots.observe(make_frame(doubtful), T0).refusal("mug") == (
        "mug: doubtful: confidence 0.20, or not confirmed yet; not tracked"
    )
    observed = slots.observe(make_frame(doubtful, make_instance(2, "mug")), T0)
    assert observed.refusal("mug") is None
    with refuses(PolicyError, field="cup"):
        observed.refusal("cup")


def test_the_vector_has_the_fields_of_each_slot() -> None:
    slots = ObjectSlots(["mug", "fork"], SIZE)
    vector = slots.observe(make_frame(make_instance(1, "mug", (32, 24, 96, 72))), seconds(0.25)).vector()
    assert vector.dtype == np.float32
    assert vector.shape == (2 * len(FIELDS),)
    mug = dict(zip(FIELDS, vector[: len(FIELDS)].tolist(), strict=True))
    edges = {"x0": 0.25, "y0": 0.25, "x1": 0.75, "y1": 0.75}
    flags = {"usable": 1, "tracked": 1, "visible": 1, "doubtful": 0, "stale": 0}
    assert mug == pytest.approx({**flags, "confidence": 0.9, "age_s": 0.25, **edges})
    assert np.count_nonzero(vector[len(FIELDS) :]) == 1  # the age of not being tracked
    assert np.isfinite(slots.observe(now_ns=seconds(1e6)).vector()).all()


def test_pictures_have_three_slots_each_and_the_overlay_the_usable_ones() -> None:
    slots = ObjectSlots(["a", "b", "c", "d"], SIZE)
    doubtful = replace(make_instance(2, "b", (0, 0, 16, 16)), doubtful=True)
    observed = slots.observe(
        make_frame(make_instance(1, "a", (64, 0, 80, 16)), doubtful, make_instance(3, "d")), T0
    )
    pictures = observed.pictures("seen")
    assert list(pictures) == ["seen_0", "seen_1"]
    for slot in range(4):
        channel = pictures[f"seen_{slot // 3}"][..., slot % 3]
        np.testing.assert_array_equal(channel, 255 * observed.masks[slot].astype(np.uint8))
    assert not pictures["seen_1"][..., 1:].any()
    image = np.full((*SIZE, 3), 100, np.uint8)
    tinted = observed.overlay(image)
    assert (image == 100).all()
    changed = (tinted != 100).any(axis=-1)
    np.testing.assert_array_equal(changed, observed.masks[0] | observed.masks[3])
    with refuses(PolicyError, field=("images", "size")):
        observed.overlay(np.zeros((9, 9, 3), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], SIZE), "names"),
        (("mug", SIZE), "names"),
        ((["mug"], (0, 4)), "size"),
        ((["mug"], SIZE, 0.0), "max_age_s"),
        ((["mug"], SIZE, 60.0), "max_age_s"),
        ((["mug"], SIZE, 0.5, "crop"), "fit"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    names, size, *rest = arguments
    options = dict(zip(("max_age_s", "fit"), rest, strict=False))
    with refuses(PolicyError, field=message):
        ObjectSlots(names, size, **options)


def test_it_reads_the_newest_masks_of_its_camera(tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/m"
    slots = ObjectSlots(["mug"], SIZE, max_age_s=50, camera="left")
    with MaskPublisher(at) as node, PerceptionClient(at, f"ipc://{tmp_path}/c") as client:
        assert slots.read(client).seq is None
        seq = 0
        while (observed := slots.read(client, timeout_ms=50)).seq is None:
            node.send(make_frame(make_instance(1, "mug"), camera="right", seq=seq))
            node.send(make_frame(make_instance(2, "mug"), camera="left", seq=seq))
            seq += 1
        assert (observed.ids.tolist(), observed.camera) == ([2], "left")
        assert slots.read(client, timeout_ms=50).ids.tolist() == [2]
        while (observed := slots.read(client, timeout_ms=50)).restarts == 0:
            node.send(replace(make_frame(make_instance(1, "mug"), camera="left", seq=seq), epoch=8))
        assert observed.ids.tolist() == [0]
        while (observed := slots.read(client, timeout_ms=50)).seq is None:
            node.send(replace(make_frame(make_instance(1, "mug"), camera="left", seq=seq), epoch=8))
        assert (observed.ids.tolist(), observed.restarts) == ([1], 1)


def test_a_restart_of_another_camera_empties_nothing() -> None:
    slots = ObjectSlots(["mug"], SIZE, camera="left")
    slots.observe(make_frame(make_instance(1, "mug"), camera="left"))
    assert slots.read(Client(NodeRestarted("", camera="right"))).ids.tolist() == [1]


def test_masks_with_damaged_pixels_leave_the_slots_as_they_were() -> None:
    class Damaged(Mask):
        """A mask as a client holds it before its pixels are decoded."""

        @property
        def crop(self) -> Any:  # type: ignore[override]
            raise WireError("masks: instance 0: mask: expected whole data")

    good = make_instance(1, "mug")
    other = make_instance(2, "cup")
    damaged = object.__new__(Damaged)
    object.__setattr__(damaged, "size", good.mask.size)
    later = seconds(3.0)
    frame = replace(
        make_frame(other, replace(make_instance(1, "mug"), mask=damaged), seq=9), capture_ns=later
    )

    slots = ObjectSlots(["cup", "mug"], SIZE)
    before = slots.observe(make_frame(other, good, seq=8), T0)
    slots.read(Client(frame))
    with pytest.raises(WireError):
        slots.observe(frame, later)
    after = slots.observe(None, T0)
    assert (after.seq, after.ids.tolist(), after.ages_s.tolist()) == (8, [2, 1], before.ages_s.tolist())
    assert np.array_equal(after.masks, before.masks)
    assert slots.observe(None, later).refusal("mug") is not None


@pytest.mark.parametrize(
    ("module", "extra"), [("gymnasium_wrapper", "gym"), ("lerobot_step", "lerobot-policy")]
)
def test_a_missing_package_is_named_with_its_extra(module: str, extra: str) -> None:
    code = (
        "import sys\nfor name in ('gymnasium', 'lerobot', 'lerobot.processor'): sys.modules[name] = None\n"
        f"try:\n    import sam3_node.client.observations.{module}\nexcept Exception as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert f"sam3-node[{extra}]" in done.stdout


def test_a_version_of_lerobot_that_was_never_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.errors.find_version", lambda package: "0.7.0")
    with refuses(MissingExtraError, field=("0.4 to 0.6", "0.7.0", "as_lerobot")):
        importlib.import_module("sam3_node.client.observations.lerobot_step")


SIZES = [((481, 643), (224, 224)), ((96, 128), (96, 128)), ((37, 53), (64, 200)), ((723, 1281), (240, 320))]
"""Sizes at which no centre of a pixel lies on an edge, where rounding would decide."""


def random_mask(size: tuple[int, int], seed: int = 0) -> Mask:
    rng = np.random.default_rng(seed)
    full = np.zeros(size, np.bool_)
    top = size[0] // 4
    left = size[1] // 3
    full[top:-3, left:-5] = rng.random((size[0] - top - 3, size[1] - left - 5)) < 0.5
    return Mask.from_full(full)


@pytest.mark.parametrize(("frame", "size"), SIZES)
def test_stretched_masks_equal_those_of_pillow(frame: tuple[int, int], size: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    mask = random_mask(frame)
    fitted = fit_mask(mask, size)
    expected = image.fromarray(mask.full().astype(np.uint8) * 255).resize(size[::-1], image.NEAREST)
    np.testing.assert_array_equal(fitted.mask, np.asarray(expected) > 0)


@pytest.mark.parametrize(("frame", "size"), SIZES)
def test_padded_masks_equal_those_of_openpi(frame: tuple[int, int], size: tuple[int, int]) -> None:
    image_tools = pytest.importorskip("openpi_client.image_tools")
    image = pytest.importorskip("PIL.Image")
    mask = random_mask(frame)
    fitted = fit_mask(mask, size, "pad")
    pixels = np.repeat(mask.full()[..., np.newaxis].astype(np.uint8) * 255, 3, axis=2)
    expected = image_tools.resize_with_pad(pixels, *size, method=image.NEAREST)
    np.testing.assert_array_equal(fitted.mask, expected[..., 0] > 0)


def test_a_padded_box_is_where_the_mask_is() -> None:
    fitted = fit_mask(make_instance(1, "a", (0, 0, 128, 96)).mask, (200, 64), "pad")
    assert fitted.box == (0, 76, 64, 124)
    rows, columns = np.nonzero(fitted.mask)
    assert (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1) == (76, 124, 0, 64)


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_a_mask_of_one_pixel_stays_visible(fit: str) -> None:
    for x, y in ((0, 0), (127, 95), (64, 31), (33, 70)):
        fitted = fit_mask(make_instance(1, "a", (x, y, x + 1, y + 1)).mask, (12, 9), fit)  # type: ignore[arg-type]
        assert fitted.mask.sum() == 1
        (row,), (column,) = np.nonzero(fitted.mask)
        assert fitted.box[1] - 1 < row < fitted.box[3]
        assert fitted.box[0] - 1 < column < fitted.box[2]


def test_an_empty_mask_is_not_visible() -> None:
    assert fit_mask(Mask.empty((96, 128)), (12, 9)) is None


def test_boxes_are_in_pixels_of_the_masks() -> None:
    slots = ObjectSlots(["a"], (48, 32))
    boxes = slots.observe(make_frame(make_instance(1, "a", (16, 32, 48, 64)))).boxes
    assert not boxes.any()  # stale
    fresh = slots.observe(now_ns=make_frame().capture_ns).boxes
    np.testing.assert_allclose(fresh, [[4, 16, 12, 32]])

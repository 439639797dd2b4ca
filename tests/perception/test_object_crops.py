"""Object crops in the pipeline: what they improve, when they rest, and that a state goes on with them."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.models import TrackerModel
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.step import StepFrame
from sam3_node.settings import TrackerSettings
from sam3_node.tracking.object_crops import CropRegion
from sam3_node.types import Frame, Mask, MaskFrame, Shed, StepDecisions
from sam3_node.wire import pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.saving import reload

SIZE = (480, 640)
FRAMES = 12
GROWTH = 1.09
"""By which all that is seen grows from frame to frame."""
OFF = TrackerSettings()
AUTO = TrackerSettings(window="auto")


@pytest.fixture(scope="module")
def approach() -> list[tuple[Frame, np.ndarray]]:
    """The recording's first frame as a camera sees it that comes nearer to one object, and the object's true masks."""
    clip = LabelledClip.load(TABLETOP)
    image = clip.image(0)
    truth = clip.truth(0)
    object_id = max(truth, key=lambda key: truth[key].sum())
    y, x = np.nonzero(truth[object_id])
    middle = np.array([x.mean(), y.mean()])
    found = []
    for seq in range(FRAMES):
        scale = GROWTH**seq
        # the object goes from where it is to the middle
        place = middle + (np.array(image.shape[1::-1]) / 2 - middle) * seq / FRAMES
        affine = np.column_stack([scale * np.eye(2), place - scale * middle])
        size = image.shape[1::-1]
        seen = cv2.warpAffine(image, affine, size, borderMode=cv2.BORDER_REFLECT_101)
        mask = cv2.warpAffine(truth[object_id].astype(np.uint8), affine, size, flags=cv2.INTER_NEAREST) > 0
        frame = Frame("cam0", seq, seq * 40_000_000, *size, "bgr8", np.ascontiguousarray(seen).tobytes())
        found.append((frame, mask))
    return found


def run(
    model: TrackerModel,
    settings: TrackerSettings,
    approach: list[tuple[Frame, np.ndarray]],
    **given: StepDecisions,
) -> tuple[Pipeline, list[MaskFrame]]:
    """Follow the object from its true mask on the first frame."""
    pipeline = Pipeline(model, settings, "cam0")
    pipeline.step(approach[0][0])
    pipeline.add(FramePrompt(mask=Mask.from_full(approach[0][1])), seq=0)
    return pipeline, [pipeline.step(StepFrame(frame, **given)) for frame, _ in approach[1:]]


def exactly(masks: list[MaskFrame]) -> list[object]:
    return [pack_masks(replace(each, stages_us={})) for each in masks]


def mean_iou(found: list[MaskFrame], approach: list[tuple[Frame, np.ndarray]]) -> float:
    ious = []
    for masks, (_, truth) in zip(found, approach[1:], strict=True):
        mask = masks.instances[0].mask.full()
        ious.append(np.count_nonzero(mask & truth) / np.count_nonzero(mask | truth))
    return float(np.mean(ious))


def test_object_crops_follow_better_what_comes_nearer(
    nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]]
) -> None:
    _, plain = run(nano, OFF, approach)
    _, with_crops = run(nano, AUTO, approach)
    assert mean_iou(with_crops, approach) > mean_iou(plain, approach) + 0.01


@pytest.mark.parametrize("corner", [(-90, 4), (4, -90), (200, 4), (4, 200), (-90, 200), (-5, 4), (4, 4)])
def test_a_region_is_cut_out_wherever_it_lies(corner: tuple[int, int]) -> None:
    image = np.arange(48 * 64 * 3, dtype=np.uint8).reshape(48, 64, 3)
    region = CropRegion(*corner, 20, 10)
    assert region.crop(image).shape == (10, 20, 3)
    assert region.overlaps(image.shape) == (abs(corner[0]) < 50 and abs(corner[1]) < 50)


def test_no_crop_while_the_node_sheds(nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]]) -> None:
    _, plain = run(nano, OFF, approach, decisions=StepDecisions(shed=Shed(1)))
    _, with_crops = run(nano, AUTO, approach, decisions=StepDecisions(shed=Shed(1)))
    assert exactly(with_crops) == exactly(plain)


def test_no_crop_where_the_frame_is_no_larger_than_the_input(nano: TrackerModel) -> None:
    side = nano.image_size
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    frame = Frame("cam0", 0, 0, side, side, "bgr8", noise.tobytes())
    mask = np.zeros((side, side), np.bool_)
    mask[40:90, 40:90] = True
    approach = [(replace(frame, seq=seq), mask) for seq in range(3)]
    assert exactly(run(nano, AUTO, approach)[1]) == exactly(run(nano, OFF, approach)[1])


@pytest.mark.parametrize("seq", [FRAMES // 2 - 1, FRAMES // 2 - 3])
def test_a_state_goes_on_bit_for_bit(
    nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]], seq: int
) -> None:
    """Prompts on the last frame, and on a past one from which the object catches up, come after the state."""
    half = FRAMES // 2
    pipeline, _ = run(nano, AUTO, approach[:half])
    other = Pipeline(nano, AUTO, "cam0")
    other.restore(reload(pipeline.state()))
    found = []
    for each in (pipeline, other):
        prompt = FramePrompt(mask=Mask.from_full(np.roll(approach[seq][1], 90, axis=1)))
        each.add(prompt, seq=seq)
        masks = [each.step(approach[half][0])]
        each.catch_ups.end_all()
        masks += [each.step(frame) for frame, _ in approach[half + 1 :]]
        found.append(exactly(masks))
    assert found[0] == found[1]


def test_a_correction_begins_a_new_crop(nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]]) -> None:
    pipeline, _ = run(nano, AUTO, approach[:4])
    wrong = np.roll(approach[3][1], 120, axis=1)
    object_id = pipeline.objects[0].id
    pipeline.refine(object_id, FramePrompt(mask=Mask.from_full(wrong)), seq=3)
    found = pipeline.step(approach[4][0]).instances[0].mask.full()
    assert np.count_nonzero(found & wrong) > np.count_nonzero(found & approach[4][1])


def test_more_objects_than_crops_and_removed_ones(
    nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]]
) -> None:
    pipeline = Pipeline(nano, AUTO, "cam0")
    pipeline.step(approach[0][0])
    masks = [np.roll(approach[0][1], 60 * place, axis=1) for place in range(6)]
    ids = [pipeline.add(FramePrompt(mask=Mask.from_full(mask)), seq=0).id for mask in masks]
    assert [item.id for item in pipeline.step(approach[1][0]).instances] == ids
    for object_id in ids[:3]:
        pipeline.remove(object_id)
    assert [item.id for item in pipeline.step(approach[2][0]).instances] == ids[3:]
    pipeline.reset()
    assert not pipeline.step(approach[3][0]).instances


def test_where_few_crops_are_allowed_the_smallest_objects_have_them(
    nano: TrackerModel, approach: list[tuple[Frame, np.ndarray]]
) -> None:
    def follow(limits: list[int | None]) -> tuple[Pipeline, list[int]]:
        pipeline = Pipeline(nano, AUTO, "cam0")
        pipeline.step(approach[0][0])
        large = approach[0][1]
        small = large.copy()
        small[: int(np.nonzero(large)[0].mean())] = False
        ids = [pipeline.add(FramePrompt(mask=Mask.from_full(mask)), seq=0).id for mask in (large, small)]
        for (frame, _), limit in zip(approach[1:], limits, strict=False):
            masks = pipeline.step(StepFrame(frame, decisions=StepDecisions(windows=limit)))
            assert masks.windows == limit
        return pipeline, ids

    def followed(limits: list[int | None]) -> list[int]:
        pipeline, ids = follow(limits)
        crops = pipeline.prompting.crops
        assert crops is not None
        return [ids.index(object_id) for object_id in ids if object_id in crops]

    assert followed([None]) == followed([2]) == [0, 1]
    assert followed([0, 0, 1]) == [1]
    assert followed([0]) == []
    # one that is open already stays
    assert followed([0, 1, 2, 1]) == [1]
    # a prompt opens none beyond the limit
    pipeline, ids = follow([0, 1])
    crops = pipeline.prompting.crops
    assert crops is not None
    pipeline.refine(ids[0], FramePrompt(mask=Mask.from_full(approach[2][1])), seq=2)
    assert [object_id in crops for object_id in ids] == [False, True]
    other = Pipeline(nano, AUTO, "cam0")
    other.restore(reload(pipeline.state()))
    assert other.prompting.crops is not None
    assert other.prompting.crops.state().most == 1


def test_what_moves_fast_has_a_crop_from_its_prompt_on(nano: TrackerModel) -> None:
    """A thing that goes by half its size a frame, among others like it, is not taken for one of these."""
    rng = np.random.default_rng(1)
    floor = cv2.resize(
        rng.integers(60, 120, (30, 40, 3), np.uint8), SIZE[::-1], interpolation=cv2.INTER_CUBIC
    )
    thing = cv2.resize(rng.integers(0, 255, (6, 6, 3), np.uint8), (64, 64), interpolation=cv2.INTER_CUBIC)
    approach = []
    for seq in range(8):
        image = floor.copy()
        mask = np.zeros(SIZE, np.bool_)
        for place in range(3):
            x = 40 + 32 * seq + 130 * place
            image[200:264, x : x + 64] = thing
        mask[200:264, 40 + 32 * seq : 104 + 32 * seq] = True
        frame = Frame(
            "cam0", seq, seq * 40_000_000, *SIZE[::-1], "bgr8", np.ascontiguousarray(image).tobytes()
        )
        approach.append((frame, mask))
    _, plain = run(nano, OFF, approach)
    _, with_crops = run(nano, AUTO, approach)
    assert mean_iou(with_crops, approach) > mean_iou(plain, approach) + 0.1

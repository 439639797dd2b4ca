"""The straight line from a frame to its masks, and the objects added, corrected and removed in between."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import Sam2Model

from sam3_node.engines.inductor import CACHE_VARIABLE
from sam3_node.errors import (
    CapacityError,
    ModelError,
    RequestError,
    UnknownFrameError,
    UnknownObjectError,
    WireError,
)
from sam3_node.geometry import Scaling
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam import tracker_model
from sam3_node.perception import loading
from sam3_node.perception.loading import load_model, load_models, warm_up
from sam3_node.perception.perception import Perception
from sam3_node.perception.pipeline import Pipeline, Surroundings
from sam3_node.perception.prompts import to_model
from sam3_node.perception.step import StepFrame
from sam3_node.settings import (
    DetectorSettings,
    EngineSettings,
    ModelSettings,
    Settings,
    SpatialSettings,
    TrackerSettings,
)
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.types import Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import encode_depth, encode_image
from sam3_node.wire.frame_prompt import FramePrompt
from tests.perception.test_prompts import BAD
from tests.support.paths import SHARED
from tests.support.refuses import refuses
from tests.support.repeats import repetitions
from tests.support.saving import reload
from tests.support.tiny import TRAINED_LOGIT, random_source, stages_of, tiny_model

WIDTH = 200
HEIGHT = 150
CENTRE = FramePrompt(points=[(100.0, 75.0)])
BOX = FramePrompt(box=[20, 20, 120, 100])


@pytest.fixture
def pipeline(model: TrackerModel) -> Pipeline:
    return Pipeline(model, TrackerSettings(max_objects=4, feature_cache=3, feature_cache_s=0), "cam0")


def picture(seq: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    random = np.random.default_rng(seq)
    coarse = random.integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((height // 6 + 1, width // 8 + 1, 1), np.uint8))[:height, :width]


def frame(seq: int, width: int = WIDTH, height: int = HEIGHT, **changes: Any) -> Frame:
    colour = encode_image(np.ascontiguousarray(picture(seq, width, height)), "bgr8")
    return replace(Frame("cam0", seq, 1000 + seq, width, height, "bgr8", colour), **changes)


def enlarge(logits: torch.Tensor) -> torch.Tensor:
    return F.interpolate(logits[:, None], (HEIGHT, WIDTH), mode="bilinear", align_corners=False)[:, 0]


def ids(masks: MaskFrame) -> list[int]:
    return [instance.id for instance in masks.instances]


def test_frames_flow_without_objects(pipeline: Pipeline) -> None:
    masks = pipeline.step(StepFrame(frame(7), received_ns=5, skipped=2))
    assert masks.instances == ()
    assert (masks.camera, masks.seq, masks.capture_ns) == ("cam0", 7, 1007)
    assert (masks.received_ns, masks.skipped) == (5, 2)
    assert (masks.width, masks.height, masks.model) == (WIDTH, HEIGHT, "tiny")


def test_masks_say_which_clock_the_capture_was_read_on(pipeline: Pipeline) -> None:
    assert pipeline.step(frame(0)).clock == "system"
    assert pipeline.step(frame(1, clock="device")).clock == "device"


def test_every_stage_that_ran_is_timed(pipeline: Pipeline) -> None:
    stages = pipeline.step(frame(0)).stages_us
    assert list(stages) == ["decode", "preprocess", "encode", "track", "masks", "remember"]
    assert all(spent >= 0 for spent in stages.values())


def test_masks_are_the_trackers_own_at_frame_size(model: TrackerModel, pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    pipeline.add(BOX)
    tracker = Tracker(model, max_objects=4)
    scaling = Scaling((HEIGHT, WIDTH), model.image_size)
    prompts = [to_model(CENTRE, 1, scaling), to_model(BOX, 2, scaling)]
    tracker.step(model.preprocess(picture(0)))
    for seq in range(1, 5):
        masks = pipeline.step(frame(seq))
        tracks = tracker.step(model.preprocess(picture(seq)), prompts if seq == 1 else ())
        whole = enlarge(tracks.logits)
        assert ids(masks) == tracks.ids
        assert masks.instances[0].area > 0
        for instance, logits, score in zip(masks.instances, whole, tracks.scores, strict=True):
            differs = torch.from_numpy(instance.mask.full()) != (logits > 0)
            assert logits[differs].abs().max().item() < 1e-3 if differs.any() else True
            assert instance.score == pytest.approx(float(score.clamp(0, 1)), abs=1e-5)


def test_an_object_is_added_on_the_next_frame(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    added = pipeline.add(CENTRE, "red mug")
    assert added == (1, None)
    assert [(known.id, known.state) for known in pipeline.objects] == [(1, "tentative")]
    instance = pipeline.step(frame(1)).instances[0]
    assert (instance.id, instance.label, instance.age) == (1, "red mug", 1)
    assert pipeline.step(frame(2)).instances[0].age == 2


def test_one_reason_is_given_for_an_object_without_points(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    object_id = pipeline.add(CENTRE, "red mug")[0]
    assert "not been on a frame" in pipeline.explain_no_points(object_id)
    pipeline.step(frame(1))
    assert pipeline.points(object_id, 10) is None
    assert "no depth" in pipeline.explain_no_points(object_id)


def with_depth(seq: int, value: int = 800) -> Frame:
    """Return a frame with an even depth in millimetres."""
    whole = frame(seq)
    image = np.full((whole.height, whole.width), value, np.uint16)
    return replace(
        whole,
        depth=encode_depth(image, "z16", 0.001, True),
        intrinsics=Intrinsics(300.0, 300.0, whole.width / 2, whole.height / 2),
    )


def test_the_object_s_own_reason_comes_before_the_frame_s_problem(model: TrackerModel) -> None:
    pipeline = Pipeline(model, TrackerSettings(min_confidence=0.0, hide_below=0.0), "cam0")
    pipeline.step(frame(0))
    object_id = pipeline.add(CENTRE, "red mug")[0]
    # 40 m are a warning alone, so the object's points are there
    pipeline.step(with_depth(1, 40_000))
    assert "scale_m" in str(pipeline.problem)
    assert pipeline.points(object_id, 10) is not None
    # an object that has no frame yet lacks no scale
    added = pipeline.add(BOX, "later")[0]
    assert "not been on a frame" in pipeline.explain_no_points(added)
    # nothing at all could be measured: the frame's problem is the reason
    pipeline.step(replace(with_depth(2, 800), intrinsics=None))
    assert "intrinsics" in pipeline.explain_no_points(object_id)
    # no depth at all: both are reported
    pipeline.step(with_depth(3, 0))
    reason = pipeline.explain_no_points(object_id)
    assert "under its mask" in reason
    assert "without any valid value" in reason


def test_ids_count_up_and_are_never_used_again(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    assert [pipeline.add(CENTRE).id, pipeline.add(BOX).id] == [1, 2]
    pipeline.remove(2)
    pipeline.step(frame(1))
    pipeline.remove(1)
    assert pipeline.add(BOX).id == 3
    pipeline.reset()
    assert pipeline.objects == []
    assert pipeline.add(BOX).id == 4
    assert ids(pipeline.step(frame(2))) == [4]


def test_a_refused_prompt_uses_no_id(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    with pytest.raises(RequestError):
        pipeline.add(FramePrompt(points=[(-1, 5)]))
    assert pipeline.add(CENTRE).id == 1


def test_a_prompt_on_a_past_frame_answers_at_once(pipeline: Pipeline) -> None:
    for seq in range(3):
        pipeline.step(frame(seq))
    added = pipeline.add(BOX, seq=1)
    assert added.result.mask.size == (HEIGHT, WIDTH)
    assert 0 <= added.result.score <= 1
    assert added.result.mask.area == pipeline.prompting.segment(BOX, seq=1).mask.area
    pipeline.catch_ups.end_all()
    assert ids(pipeline.step(frame(3))) == [1]


@pytest.mark.parametrize("prompt", [CENTRE, BOX])
def test_an_object_begins_with_the_mask_that_was_chosen(pipeline: Pipeline, prompt: FramePrompt) -> None:
    for seq in range(3):
        pipeline.step(frame(seq))
    shown = pipeline.prompting.candidates(prompt, seq=1)
    assert len({result.mask.area for result in shown}) == 3
    assert [result.score for result in shown] == sorted((result.score for result in shown), reverse=True)
    begun = [pipeline.add(prompt, seq=1, choice=choice).result for choice in range(3)]
    assert [(one.score, one.mask.area) for one in begun if one] == [
        (one.score, one.mask.area) for one in shown
    ]
    waiting = pipeline.add(prompt, choice=2).id
    pipeline.catch_ups.end_all()
    entered = pipeline.step(frame(3)).instances[-1]
    assert (entered.id, entered.mask.area) == (waiting, pipeline.prompting.candidates(prompt)[2].mask.area)


def test_a_choice_that_there_is_not_is_refused(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    mask = FramePrompt(mask=Mask.from_full(np.ones((HEIGHT, WIDTH), np.bool_)))
    for prompt, choice in ((CENTRE, 3), (mask, 0)):
        with refuses(RequestError, field="choice"):
            pipeline.add(prompt, choice=choice)
    with refuses(RequestError, field="segment"):
        pipeline.prompting.candidates(mask)
    assert pipeline.add(CENTRE, choice=2).id == 1


def test_weights_that_were_not_trained_to_compete_have_one_mask() -> None:
    pipeline = Pipeline(load_tracker("nano"), TrackerSettings(), "cam0")
    pipeline.step(frame(0))
    (only,) = pipeline.prompting.candidates(CENTRE)
    assert np.array_equal(only.mask.full(), pipeline.prompting.segment(CENTRE).mask.full())
    with refuses(RequestError, field="choice"):
        pipeline.add(CENTRE, choice=1)
    assert pipeline.add(CENTRE, seq=0, choice=0).result.mask.area == only.mask.area


def prompt_off_centre(mask: Mask) -> FramePrompt:
    """Return a background point in the middle of the object's box."""
    x0, y0, x1, y1 = mask.box
    return FramePrompt(points=[((x0 + x1) / 2, (y0 + y1) / 2)], labels=[0])


@pytest.mark.parametrize("seq", [1, None])
def test_refining_answers_at_once_on_the_latest_frame_or_another(pipeline: Pipeline, seq: int | None) -> None:
    pipeline.step(frame(0))
    pipeline.add(BOX, seq=0)
    before = pipeline.step(frame(1)).instances[0].mask
    answer = pipeline.refine(1, prompt_off_centre(before), seq)
    assert answer.seq == 1
    assert (answer.mask.full() != before.full()).any()
    assert ids(pipeline.step(frame(2))) == [1]


def test_points_correct_the_mask_so_far_of_the_frame_they_are_on(
    model: TrackerModel, pipeline: Pipeline
) -> None:
    """The second correction starts from the first, and the first from the mask that was tracked on the same frame."""
    scaling = Scaling((HEIGHT, WIDTH), model.image_size)
    for seq in range(2):
        pipeline.step(frame(seq))
    pipeline.add(BOX, seq=1)
    tracked = pipeline.step(frame(2)).instances[0]
    tracker = Tracker(model, max_objects=4)
    features = [model.encode(model.preprocess(picture(seq))) for seq in range(3)]
    for known in features[:2]:
        tracker.step_features(known)
    tracker.prompt_at(features[1], 1, to_model(BOX, 1, scaling))
    logits = tracker.step_features(features[2]).logits[0]
    for prompt in (prompt_off_centre(tracked.mask), FramePrompt(points=[(20, 20)])):
        logits, _ = tracker.prompt_at(features[2], 2, to_model(prompt, 1, scaling, logits))
        (expected,) = enlarge(logits[None])
        differs = torch.from_numpy(pipeline.refine(1, prompt).mask.full()) != (expected > 0)
        assert not differs.any() or expected[differs].abs().max().item() < 1e-3


def test_an_object_that_waits_for_its_first_frame_cannot_be_refined(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    for seq in (0, None):
        with refuses(RequestError, field=("1", "refine")):
            pipeline.refine(1, CENTRE, seq)
    assert ids(pipeline.step(frame(1))) == [1]
    assert pipeline.refine(1, CENTRE).seq == 1


def test_a_removed_object_leaves_nothing_behind(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    for _ in range(20):
        added = pipeline.add(BOX, seq=0)
        pipeline.refine(added.id, CENTRE)
        pipeline.remove(added.id)
    assert pipeline.prompting.cache_usage["cached_frames"] == 1
    assert not pipeline.prompting.find(0).logits
    assert ids(pipeline.step(frame(1))) == []


def test_segment_tracks_nothing_and_knows_the_frames_it_holds(pipeline: Pipeline) -> None:
    with refuses(UnknownFrameError, field="none"):
        pipeline.prompting.segment(BOX)
    for seq in range(5):
        pipeline.step(frame(seq))
    assert pipeline.prompting.segment(BOX).seq == 4
    newest, fourth = (pipeline.prompting.segment(BOX, **seq).mask.full() for seq in ({}, {"seq": 4}))
    assert np.array_equal(newest, fourth)
    for lost in (1, 99):
        with refuses(UnknownFrameError, field=str(lost)):
            pipeline.prompting.segment(BOX, seq=lost)
    assert pipeline.step(frame(5)).instances == ()


def test_a_camera_that_starts_again(pipeline: Pipeline) -> None:
    for seq in (0, 1, 2, 0, 1):
        pipeline.step(frame(seq))
    assert pipeline.prompting.segment(BOX).seq == 1
    pipeline.add(BOX, seq=1)
    assert ids(pipeline.step(frame(2))) == [1]


def test_an_object_out_of_view_is_occluded_and_counts() -> None:
    pipeline = Pipeline(tiny_model(presence=-60.0), TrackerSettings(), "cam0")
    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    for seq in range(1, 4):
        one = pipeline.step(frame(seq)).instances[0]
        assert (one.state, one.frames_since_seen, one.age, one.area) == ("occluded", seq, seq, 0)


def test_the_frame_size_may_change(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    pipeline.step(frame(1))
    masks = pipeline.step(frame(2, width=320, height=120))
    assert (masks.width, masks.height, masks.instances[0].mask.size) == (320, 120, (120, 320))
    pipeline.refine(1, FramePrompt(points=[(310, 10)]))
    with pytest.raises(RequestError, match="200 x 150"):
        pipeline.refine(1, FramePrompt(points=[(310, 10)]), seq=1)


def test_a_frame_that_does_not_decode_changes_nothing(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    with pytest.raises(WireError):
        pipeline.step(frame(1, encoding="jpeg", colour=b"\xff\xd8 no jpeg"))
    assert ids(pipeline.step(frame(2))) == [1]


def test_a_step_that_fails_loses_what_was_to_enter_and_no_more(
    model: TrackerModel, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    pipeline.step(frame(0))
    pipeline.add(CENTRE)
    pipeline.step(frame(1))
    pipeline.add(BOX)
    with monkeypatch.context() as fault:
        fault.setattr(model.decode_stage, "forward", run_out_of_memory)
        with pytest.raises(RuntimeError):
            pipeline.step(frame(2))
    assert [known.id for known in pipeline.objects] == [1]
    assert ids(pipeline.step(frame(3))) == [1]
    assert pipeline.add(BOX).id == 3


def complete(model: TrackerModel) -> Pipeline:
    """Return a pipeline with all optional stages but the robot's."""
    settings = TrackerSettings(max_objects=4, window="auto", min_confidence=0.0, hide_below=0.0)
    return Pipeline(model, settings, "cam0", surroundings=Surroundings(SpatialSettings(table=True)))


def test_a_frame_goes_on_without_the_stages_beside_its_masks(
    model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = complete(model)
    expected = [stage.name for stage in pipeline.stages if stage.is_optional]
    assert {"window", "recall", "choose", "depth", "spatial", "table", "held", "remember"} <= {*expected}
    pipeline.step(with_depth(0))
    pipeline.add(CENTRE)

    def fail(step: StepFrame) -> None:
        raise ValueError(f"no luck on {step.frame.seq}")

    for stage in pipeline.stages:
        if stage.is_optional:
            monkeypatch.setattr(stage, "run", fail)
    for seq in (1, 2):
        assert ids(pipeline.step(with_depth(seq))) == [1]
        for name in expected:
            assert f"the stage {name} failed" in str(pipeline.problem)
    assert "ValueError: no luck on 2" in str(pipeline.problem)
    assert pipeline.stage_failures == dict.fromkeys(expected, 2)
    monkeypatch.undo()
    (instance,) = pipeline.step(with_depth(3)).instances
    assert (pipeline.problem, instance.position_m is None) == (None, False)


def test_what_fails_after_the_masks_is_told_with_the_next_ones(
    model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = complete(model)
    pipeline.step(with_depth(0))
    pipeline.add(CENTRE)

    def fail(step: StepFrame) -> None:
        raise ValueError(f"no luck on {step.frame.seq}")

    [remember] = [stage for stage in pipeline.stages if stage.name == "remember"]
    monkeypatch.setattr(remember, "finish", fail)
    assert ids(pipeline.step(with_depth(1))) == [1]
    assert pipeline.problem is None
    assert ids(pipeline.step(with_depth(2))) == [1]
    assert "no luck on 1" in str(pipeline.problem)


def test_memory_that_runs_out_ends_the_step_whichever_stage_asked_for_it(
    model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a replay, it may suffice, and the masks would be others."""

    def run_out(_: StepFrame) -> None:
        raise MemoryError

    pipeline = complete(model)
    pipeline.step(with_depth(0))
    monkeypatch.setattr(next(stage for stage in pipeline.stages if stage.name == "spatial"), "run", run_out)
    with pytest.raises(MemoryError):
        pipeline.step(with_depth(1))


@pytest.mark.parametrize("size", [(3000, 1), (3000, 11), (1, 3000)])
def test_flat_frames_of_line_scan_cameras(model: TrackerModel, size: tuple[int, int]) -> None:
    pipeline = complete(model)
    pipeline.step(frame(0, *size))
    pipeline.add(FramePrompt(mask=Mask.from_full(np.ones(size[::-1], np.bool_))))
    for seq in (1, 2, 3):
        assert ids(pipeline.step(frame(seq, *size))) == [1]
        assert pipeline.problem is None
    memory = pipeline.memory.require(1)
    assert memory.picture is not None


def test_no_more_objects_than_room(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    for _ in range(4):
        pipeline.add(CENTRE)
    with refuses(CapacityError, field="max_objects"):
        pipeline.add(CENTRE)
    pipeline.remove(2)
    pipeline.add(CENTRE)
    assert ids(pipeline.step(frame(1))) == [1, 3, 4, 5]


def test_unknown_objects(pipeline: Pipeline) -> None:
    pipeline.step(frame(0))
    with refuses(UnknownObjectError, field=("3", "none")):
        pipeline.remove(3)
    with pytest.raises(UnknownObjectError):
        pipeline.refine(3, CENTRE)


FULL = Mask.from_full(np.ones((HEIGHT, WIDTH), dtype=np.bool_))
BAD_PROMPTS: dict[str, dict[str, Any]] = {
    **BAD,
    "outside": {"points": [(WIDTH, 5)]},
    "labels alone": {"labels": [1], "box": [0, 0, 5, 5]},
    "box outside": {"box": [WIDTH, 0, WIDTH + 50, 50]},
    "mask of another size": {"mask": Mask.from_full(np.ones((4, 4), dtype=np.bool_))},
    "empty mask": {"mask": Mask.empty((HEIGHT, WIDTH))},
    "mask and box": {"mask": FULL, "box": [0, 0, 5, 5]},
    "mask and labels": {"mask": FULL, "labels": [1]},
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_refused_and_the_line_goes_on(pipeline: Pipeline, name: str) -> None:
    pipeline.step(frame(0))
    pipeline.add(CENTRE, seq=0)
    for request in (lambda prompt: pipeline.add(prompt), lambda prompt: pipeline.refine(1, prompt, seq=0)):
        with pytest.raises(RequestError):
            request(FramePrompt(**BAD_PROMPTS[name]))
    assert ids(pipeline.step(frame(1))) == [1]


def test_a_box_is_clipped_and_a_mask_is_taken_as_it_is(model: TrackerModel, pipeline: Pipeline) -> None:
    scaling = Scaling((HEIGHT, WIDTH), model.image_size)
    box = np.asarray(to_model(FramePrompt(box=[-50, -50, 100, 1000]), 1, scaling).points[:2].flatten())
    assert box == pytest.approx([0, 0, model.image_size / 2, model.image_size])
    pipeline.step(frame(0))
    full = np.zeros((HEIGHT, WIDTH), dtype=np.bool_)
    full[30:90, 40:140] = True
    answer = pipeline.add(FramePrompt(mask=Mask.from_full(full)), seq=0).result
    assert overlap(answer.mask, full) > 0.8


def test_the_smallest_mask_is_not_lost(model: TrackerModel) -> None:
    full = np.zeros((1500, 2000), dtype=np.bool_)
    full[700, 900] = True
    prompt = to_model(FramePrompt(mask=Mask.from_full(full)), 1, Scaling((1500, 2000), model.image_size))
    assert np.asarray(prompt.mask).sum() == 1


def test_weights_without_memory_segment_and_track() -> None:
    source = random_source("sam2", presence=60.0)
    stills = TrackerModel(source, name="stills", mean=[0.5] * 3, std=[0.5] * 3, has_memory=False)
    pipeline = Pipeline(stills, TrackerSettings(), "cam0")
    pipeline.step(frame(0))
    assert pipeline.prompting.segment(BOX).mask.size == (HEIGHT, WIDTH)
    added = pipeline.add(BOX, seq=0)
    pipeline.add(CENTRE)
    masks = pipeline.step(frame(1))
    assert ids(masks) == [1, 2]
    assert all(instance.confidence is not None for instance in masks.instances if instance.area)
    state = reload(pipeline.state())
    expected = pipeline.step(frame(2))
    again = Pipeline(stills, TrackerSettings(), "cam0")
    again.restore(state)
    for ours, theirs in zip(again.step(frame(2)).instances, expected.instances, strict=True):
        assert (ours.confidence, ours.score) == (theirs.confidence, theirs.score)
        assert np.array_equal(ours.mask.full(), theirs.mask.full())
    pipeline.refine(added.id, CENTRE)
    pipeline.remove(added.id)
    assert ids(pipeline.step(frame(3))) == [2]


def test_a_model_that_cannot_be_loaded() -> None:
    with refuses(ModelError, field="folder"):
        load_model(ModelSettings(name="./no/such/folder"), TrackerSettings())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_stages_are_timed_and_the_masks_agree() -> None:
    # a source each: stages share the weights of theirs, and would move with them
    models = [stages_of(random_source("sam3", presence=60.0)).to(at) for at in ("cpu", "cuda")]
    pipelines = [Pipeline(model, TrackerSettings(), "cam0") for model in models]
    expected, found = ([step_with_box(pipeline, seq) for seq in range(4)] for pipeline in pipelines)
    assert all(spent >= 0 for masks in found for spent in masks.stages_us.values())
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        same = ours.instances[0].mask.full() == theirs.instances[0].mask.full()
        assert same.mean() > 0.97


def step_with_box(pipeline: Pipeline, seq: int) -> MaskFrame:
    masks = pipeline.step(frame(seq))
    if seq == 0:
        pipeline.add(BOX)
    return masks


def second_instance(model: TrackerModel, hide_below: float) -> Instance:
    """Add an object and return its instance on the second frame with it."""
    pipeline = Pipeline(model, TrackerSettings(max_objects=4, hide_below=hide_below), "cam0")
    pipeline.step(frame(0))
    pipeline.add(FramePrompt(points=[(100.0, 75.0)]))
    pipeline.step(frame(1))
    (instance,) = pipeline.step(frame(2)).instances
    return instance


def test_a_mask_that_is_surely_wrong_is_not_published_and_its_object_is_occluded() -> None:
    calibrated = stages_of(random_source("sam3", presence=60.0), "nano")
    shown = second_instance(calibrated, hide_below=0.0)
    assert shown.state == "tracked"
    just_shown = second_instance(calibrated, hide_below=shown.confidence)
    assert (just_shown.state, just_shown.mask.area) == ("tracked", shown.mask.area)
    hidden = second_instance(calibrated, hide_below=1.0)
    assert (hidden.state, hidden.confidence, hidden.mask.area) == ("occluded", None, 0)
    assert hidden.mask.size == (HEIGHT, WIDTH)
    assert (hidden.age, hidden.frames_since_seen) == (2, 2)


def test_no_mask_is_hidden_where_the_confidence_is_not_calibrated() -> None:
    shown = second_instance(tiny_model(presence=60.0), hide_below=1.0)
    assert shown.state == "tracked"
    assert shown.mask.area > 0


SEGMENT_ONLY = SHARED / "weights" / "sam2-hiera-tiny"


@pytest.mark.verifies(
    "network", "SAM 2.1: images", "real data", "public weights; transformers, each mask to choose from"
)
@pytest.mark.skipif(not SEGMENT_ONLY.exists(), reason="needs ../shared/weights")
def test_real_weights_without_memory_segment_track_and_tell_the_part_from_the_whole() -> None:
    model = load_tracker(SEGMENT_ONLY)
    part, whole = np.zeros((2, HEIGHT, WIDTH), np.bool_)
    part[60:90, 70:110] = whole[30:120, 40:160] = True
    image = np.full((HEIGHT, WIDTH, 3), 40, np.uint8)
    image[whole] = (30, 60, 220)
    image[part] = (200, 200, 20)
    pipeline = Pipeline(model, TrackerSettings(), "cam0")
    box = FramePrompt(box=[35, 25, 165, 125])
    pipeline.step(frame(0, colour=encode_image(image, "bgr8")))
    shown = [found.mask for found in pipeline.prompting.candidates(FramePrompt(points=[(90, 75)]))]
    assert max(overlap(mask, part) for mask in shown) > 0.9
    assert max(overlap(mask, whole) for mask in shown) > 0.9
    assert overlap(pipeline.prompting.segment(box).mask, whole) > 0.9
    added = pipeline.add(box).id
    (tracked,) = pipeline.step(frame(1, colour=encode_image(np.roll(image, 6, 1), "bgr8"))).instances
    assert (tracked.id, tracked.state) == (added, "tracked")
    assert overlap(tracked.mask, np.roll(whole, 6, 1)) > 0.9
    pixels = model.preprocess(image)
    point = [[90 / WIDTH * model.image_size, 75 / HEIGHT * model.image_size]]
    logits, scores = Tracker(model).segment_candidates(model.encode(pixels), ObjectPrompt(1, points=point))
    with torch.inference_mode():
        labels = torch.ones(1, 1, 1, dtype=torch.int)
        truth = Sam2Model.from_pretrained(SEGMENT_ONLY)(
            pixels, input_points=torch.tensor([[point]]), input_labels=labels
        )
    order = truth.iou_scores[0, 0].argsort(descending=True)
    assert (logits - truth.pred_masks[0, 0, order]).abs().max() < 1e-3
    assert (scores - truth.iou_scores[0, 0, order]).abs().max() < 1e-3
    assert logits.abs().max() > TRAINED_LOGIT


def overlap(mask: Mask, truth: np.ndarray) -> float:
    """Return the IoU."""
    return float((mask.full() & truth).sum() / (mask.full() | truth).sum())


SIDE = 64


class CountingBackend:
    """A backend of torch.compile that compiles nothing and counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend() -> Iterator[CountingBackend]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield CountingBackend()
    torch._dynamo.reset()


def blank(seq: int) -> Frame:
    return Frame("cam", seq, seq, SIDE, SIDE, "bgr8", bytes(SIDE * SIDE * 3))


@pytest.fixture(params=["cpu", "gpu"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run as on a CPU, or as on a GPU: in larger batches, and without the convolutions of oneDNN and NNPACK."""
    if request.param == "cpu":
        yield
        return
    monkeypatch.setattr(tracker_model, "CPU_COMPILED_BATCH", tracker_model.GPU_BATCH)
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        yield


@pytest.mark.usefixtures("batches")
def test_neither_frames_nor_prompts_compile_after_the_warm_up(backend: CountingBackend) -> None:
    objects = repetitions(4, 17)
    settings = Settings(tracker=TrackerSettings(max_objects=objects))
    model = tiny_model(hidden=64, size=56)
    model.compile(backend)
    warm_up(model, settings, model.stages)
    warm = backend.graphs
    errors = torch._dynamo.utils.counters["frames"].copy()
    assert warm == 1 + 3 * 2, "one encoder, and the other stages for one and for more objects"
    pipeline = Pipeline(model, settings.tracker, "cam")
    pipeline.step(blank(0))
    full = np.zeros((SIDE, SIDE), dtype=np.bool_)
    full[10:30, 10:30] = True
    prompts = [
        FramePrompt(points=[(9, 9)]),
        FramePrompt(points=[(5, 9), (20, 9), (50, 50)], labels=[1, 1, 0]),
        FramePrompt(box=(4, 4, 30, 30)),
        FramePrompt(mask=Mask.from_full(full)),
        FramePrompt(points=[(9, 9), (30, 9)]),
        FramePrompt(box=(4, 4, 30, 30), points=[(9, 9)]),
    ]
    for seq in range(objects):
        prompt = prompts[seq % len(prompts)]
        added = pipeline.add(prompt, seq=seq if seq % 2 else None)
        pipeline.step(blank(seq + 1))
        pipeline.refine(added.id, prompt)
        if prompt.mask is None:
            pipeline.prompting.segment(prompt)
    assert len(pipeline.objects) == objects
    # all objects come to have equally many memories, then one has more
    for seq in range(objects + 1, objects + 10):
        pipeline.step(blank(seq))
    for seq in range(objects + 10, objects + 18):
        pipeline.refine(pipeline.objects[0].id, prompts[0])
        pipeline.step(blank(seq))
    assert backend.graphs == warm
    assert torch._dynamo.utils.counters["frames"] == errors, (
        "dynamo gave up on a function, or traced another one"
    )


class Searcher:
    """A detector that shares the tracker's trunk, and counts the frames that it has seen with it."""

    def __init__(self, tracker: TrackerModel) -> None:
        tracker.share_trunk()
        self.phrases: list[str] = []
        self.trunks: list[torch.Tensor | None] = []

    def prepare(self, phrases: list[str]) -> tuple[str, ...]:
        self.phrases += phrases
        return tuple(phrases)

    def detect(self, image: Any, query: Any, threshold: float, trunk: torch.Tensor | None = None) -> list:
        self.trunks.append(trunk)
        return []


@pytest.fixture
def compiling(
    backend: CountingBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> tuple[Settings, list[str]]:
    """Settings of a start that compiles by `backend`, and the cache folders of its gate, which runs the encoder."""
    random_source("sam3", hidden=64, size=56).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(TrackerModel, "compile", partialmethod(TrackerModel.compile, backend))
    monkeypatch.setenv(CACHE_VARIABLE, "restored afterwards")
    monkeypatch.delenv(CACHE_VARIABLE)
    folders: list[str] = []

    @torch.inference_mode()
    def run_gate(model: TrackerModel, settings: Settings) -> None:
        model.encode(torch.zeros(1, 3, model.image_size, model.image_size))
        folders.append(cache_dir())

    def load(detector: object, settings: object, model: TrackerModel, engine: object) -> Searcher:
        return Searcher(model)

    monkeypatch.setattr(loading, "serve_fast_torch", run_gate)
    monkeypatch.setattr(loading, "load_configured_detector", load)
    settings = Settings(
        model=ModelSettings(name=str(tmp_path / "tiny"), device="cpu", compile=True),
        tracker=TrackerSettings(max_objects=1),
        detector=DetectorSettings(kind="sam3-concept"),
        engine=EngineSettings(folder=tmp_path / "engines"),
    )
    return settings, folders


def test_a_start_with_a_detector_compiles_each_stage_once(
    backend: CountingBackend, compiling: tuple[Settings, list[str]]
) -> None:
    """The detector is loaded before the gate and the warm-up, because sharing adds an output to the encoder."""
    settings, folders = compiling
    model, detector = load_models(settings)
    # the gate compiles into the folder of engines
    assert folders == [str(settings.engine.folder / "compiled")]
    # the detector runs before the first frame
    assert isinstance(detector, Searcher)
    assert len(detector.phrases) == len(detector.trunks) == 1
    assert detector.trunks[0] is not None
    warm = backend.graphs
    Pipeline(model, settings.tracker, "cam").step(blank(0))
    assert backend.graphs == warm == 4, "one of each stage"


def test_the_warm_up_prompts_in_each_way(model: TrackerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    add = Pipeline.add

    def record(pipeline: Pipeline, prompt: FramePrompt, **options: Any) -> Any:
        seen.update(name for name in ("points", "box", "mask") if getattr(prompt, name) is not None)
        return add(pipeline, prompt, **options)

    monkeypatch.setattr(Pipeline, "add", record)
    warm_up(model, Settings(tracker=TrackerSettings(max_objects=1)), model.stages)
    assert seen == {"points", "box", "mask"}


def test_a_checkout_that_is_not_installed_has_no_version(
    model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", find)
    settings = Settings(detector=DetectorSettings(kind="none"))
    described = Perception(settings, model, None).describe()
    assert described["versions"]["sam3-node"] == "not installed"

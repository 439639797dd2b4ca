"""Prompts on past frames: the object catches up through the cached frames while live frames go on being stepped."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from sam3_node.errors import CapacityError, UnknownFrameError
from sam3_node.models import TrackerModel
from sam3_node.perception.catch_up import MAX_CORRECTIONS, MAX_WAY, CacheLimits
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.perception.test_pipeline import BOX, CENTRE, frame, ids
from tests.support.refuses import refuses
from tests.support.saving import pack, reload
from tests.support.tiny import tiny_model

NANOSECONDS = 1_000_000_000
FPS = 10
NEGATIVE = FramePrompt(points=[(70.0, 60.0)], labels=[0])


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return tiny_model(presence=60.0, hidden=64, size=56)


@pytest.fixture
def make(model: TrackerModel) -> Callable[..., Pipeline]:
    return partial(make_pipeline, model)


def make_pipeline(model: TrackerModel, **settings: float) -> Pipeline:
    return Pipeline(model, TrackerSettings(**{"max_objects": 4, "feature_cache": 2, **settings}), "cam0")


def timed(seq: int) -> Frame:
    return replace(frame(seq), capture_ns=seq * NANOSECONDS // FPS)


def step(pipeline: Pipeline, *seqs: int) -> MaskFrame:
    """Step these frames; return the masks of the last."""
    for seq in seqs:
        masks = pipeline.step(timed(seq))
    return masks


def is_cached(pipeline: Pipeline, seq: int) -> bool:
    try:
        pipeline.prompting.find(seq)
    except UnknownFrameError:
        return False
    return True


def results(pipeline: Pipeline, seqs: Sequence[int]) -> list[bytes]:
    """Step these frames; return the whole messages, but for the times of the stages."""
    return [pack_masks(replace(pipeline.step(timed(seq)), stages_us={}))[1] for seq in seqs]


def test_frames_are_kept_by_time_by_memory_and_by_number(make: Callable[..., Pipeline]) -> None:
    pipeline = make(feature_cache_s=1.0)
    step(pipeline, *range(30))
    usage = pipeline.prompting.cache_usage
    assert (usage["cached_frames"], usage["catching_up"]) == (FPS + 1, 0)
    assert pipeline.prompting.segment(BOX, seq=19).seq == 19
    with refuses(UnknownFrameError, field=("11", "19", "29", "seq")):
        pipeline.prompting.segment(BOX, seq=18)
    each = usage["cached_bytes"] // usage["cached_frames"]
    small = make(feature_cache_s=1.0, feature_cache_mb=5.5 * each / 1e6)
    step(small, *range(30))
    assert small.prompting.cache_usage["cached_frames"] == 5
    assert small.prompting.cache_usage["cached_bytes"] <= 5.5 * each
    none = make(feature_cache_s=0, feature_cache_mb=0)
    step(none, *range(9))
    assert none.prompting.cache_usage["cached_frames"] == 2


def test_memory_of_cached_frames_includes_masks_of_objects_and_prompts(make: Callable[..., Pipeline]) -> None:
    pipeline = make(feature_cache_s=0)
    step(pipeline, 0, 1)
    empty = pipeline.prompting.cache_usage["cached_bytes"]
    pipeline.add(BOX, seq=1)
    prompted = pipeline.prompting.cache_usage["cached_bytes"]
    pipeline.refine(1, NEGATIVE)
    assert pipeline.prompting.cache_usage["cached_bytes"] == prompted > empty
    step(pipeline, 2)
    assert pipeline.prompting.cache_usage["cached_bytes"] == 2 * prompted - empty


def test_old_frames_may_be_kept_on_the_host(
    make: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of their features give the same prompts."""
    expected = make()
    limits = CacheLimits.from_settings
    with monkeypatch.context() as patch:  # as for features that are large beside the memory of a GPU
        patch.setattr(CacheLimits, "from_settings", lambda *args: replace(limits(*args), on_host=True))
        pipeline = make()
    for each in (expected, pipeline):
        step(each, 0)
    before = pipeline.prompting.find(0).features
    for each in (expected, pipeline):
        step(each, *range(1, 6))
        each.add(CENTRE, seq=0)
        each.catch_ups.end_all()
    assert pipeline.prompting.find(0).features.top is not before.top
    assert pipeline.prompting.find(0).features.top.equal(before.top)
    assert results(pipeline, [6, 7]) == results(expected, [6, 7])


@pytest.mark.parametrize("slices", [0, 1, 2, 3, 100])
def test_the_division_of_the_work_does_not_matter(make: Callable[..., Pipeline], slices: int) -> None:
    """However it is sliced, and even if frames leave the cache meanwhile, the object is the one of a live prompt."""
    live = make()
    late = make(feature_cache_s=1.0)
    step(live, *range(6))
    live.add(CENTRE, seq=5)
    step(live, *range(6, 28))
    step(late, *range(15))
    answer = late.add(CENTRE, seq=5)
    assert answer.result
    assert answer.result.seq == 5
    assert [(known.id, known.state) for known in late.objects] == [(1, "tentative")]
    for seq in range(15, 28):
        for _ in range(slices):
            late.catch_ups.advance()
        step(late, seq)
    assert (slices > 1) == (late.catch_ups.behind == 0)
    late.catch_ups.end_all()
    assert results(late, range(28, 33)) == results(live, range(28, 33))


@pytest.mark.parametrize("slices", [0.3, 0.5, 1, 3])
@pytest.mark.parametrize("newest", [14, 159])
def test_with_a_stride_and_from_a_pinned_frame_neither_does_it_matter(
    make: Callable[..., Pipeline], slices: float, newest: int
) -> None:
    """The object is tracked on every third frame and the latest, or on all that stay since a pinned one.

    One that joins after the same step is equal, also while these frames leave the cache and the lease ends.
    """
    late = make(feature_cache_s=1.0)
    at_once = make(feature_cache_s=1.0)
    is_pinned = newest > 14
    for pipeline in (late, at_once):
        step(pipeline, *range(9))
        before = pipeline.prompting.segment(CENTRE, seq=5).mask.full()
        if is_pinned:
            pipeline.prompting.pin(5, 60.0)
        step(pipeline, *range(9, newest + 1))
        assert (pipeline.prompting.segment(CENTRE, seq=5).mask.full() == before).all()
        pipeline.catch_ups.stride = 6
        pipeline.add(CENTRE, seq=5, stride=None if is_pinned else 3)
        if is_pinned and slices >= 1:
            pipeline.prompting.pin(5, 0)
    if is_pinned:
        assert late.prompting.cache_usage["cached_frames"] == 1 + MAX_WAY + FPS + 1
        way = [seq for seq in range(newest + 1) if is_cached(late, seq)]
        assert max(after - seq for seq, after in pairwise(way)) <= 2 * 150 / MAX_WAY
        assert late.catch_ups.get_stride(1) in (2, 3, 4)  # which leaves out none of these
    else:
        assert (late.catch_ups.behind, late.catch_ups.get_stride(1)) == (3, 3)
    done = 0.0
    for seq in range(newest + 1, newest + 21):
        done += slices
        while late.catch_ups.behind and done >= 1:
            done -= 1
            late.catch_ups.advance()
        if not late.catch_ups.behind:
            break
        for pipeline in (late, at_once):
            step(pipeline, seq)
    assert (slices > (1 if is_pinned else 0.3)) == (late.catch_ups.behind == 0)
    for pipeline in (late, at_once):
        pipeline.catch_ups.end_all()
    assert pack(at_once.state()) == pack(late.state())
    # as if it had been tracked on each frame
    assert late.objects[0].age == late.prompting.find(None).frame_number - 5
    assert results(at_once, range(newest + 21, newest + 26)) == results(late, range(newest + 21, newest + 26))


def test_pinned_frames_keep_within_the_memory_and_end_with_their_lease(make: Callable[..., Pipeline]) -> None:
    pipeline = make(feature_cache_s=1.0, feature_cache_mb=16.5 * 16_384 / 1e6)
    step(pipeline, *range(9))
    assert pipeline.prompting.cache_usage["cached_bytes"] == 9 * 16_384
    pipeline.prompting.pin(5, 8.0)
    step(pipeline, *range(9, 89))
    assert pipeline.prompting.cache_usage["cached_frames"] == 16
    assert pipeline.prompting.segment(BOX, seq=5).seq == 5
    step(pipeline, *range(89, 100))  # the lease has ended, and the frames since leave one by one
    usage = pipeline.prompting.cache_usage
    assert (usage["cached_frames"], usage["pinned_frames"]) == (FPS + 1, 0)
    pipeline.prompting.pin(99, 60.0)
    step(pipeline, 3)  # the camera was started again
    assert pipeline.prompting.cache_usage["pinned_frames"] == 0


def test_objects_wait_in_line(make: Callable[..., Pipeline]) -> None:
    pipeline = make(feature_cache_s=1.0)
    step(pipeline, *range(10))
    first = pipeline.add(CENTRE, seq=7)
    second = pipeline.add(BOX, seq=5)
    assert pipeline.catch_ups.behind == 2 + 4
    reported = [pipeline.catch_ups.advance() for _ in range(6)]
    assert [found and found.id for found in reported] == [None, first.id, None, None, None, second.id]
    assert ids(step(pipeline, 10)) == [1, 2]
    assert [known.age for known in pipeline.objects] == [3, 5]


def test_a_corrected_object_keeps_its_masks_until_it_has_caught_up(make: Callable[..., Pipeline]) -> None:
    untouched = make()
    pipeline = make()
    for each in (untouched, pipeline):
        step(each, 0)
        each.add(BOX, seq=0)
        step(each, *range(1, 10))
    answer = pipeline.refine(1, FramePrompt(box=[120, 90, 190, 140]), seq=5)
    assert answer.seq == 5
    for seq in (10, 11):
        assert results(pipeline, [seq]) == results(untouched, [seq])
        pipeline.catch_ups.advance()
    pipeline.catch_ups.end_all()
    now, before = (step(each, 12).instances[0] for each in (pipeline, untouched))
    assert (now.id, now.age, now.state) == (before.id, before.age, "tracked")
    assert now.score != before.score


def test_clicks_on_a_frozen_frame_correct_one_another(make: Callable[..., Pipeline]) -> None:
    """Each begins again from the mask of the one before. Work in between leaves no trace."""
    found = []
    for work in (0, 4):
        pipeline = make()
        step(pipeline, *range(9))
        pipeline.add(CENTRE, seq=2)
        for seq in range(9, 9 + work):
            step(pipeline, seq)
            pipeline.catch_ups.advance()
        for seq in range(9 + work, 13):
            step(pipeline, seq)
        answer = pipeline.refine(1, NEGATIVE, seq=2)
        assert (pipeline.prompting.segment(CENTRE, seq=2).mask.full() != answer.mask.full()).any()
        pipeline.catch_ups.end_all()
        found.append((answer.score, results(pipeline, range(13, 16))))
    assert found[0] == found[1]


def test_a_prompt_on_the_newest_frame_ends_the_way(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    step(pipeline, *range(9))
    pipeline.add(CENTRE, seq=2)
    pipeline.catch_ups.advance()
    assert pipeline.refine(1, BOX).seq == 8
    assert (pipeline.catch_ups.behind, len(pipeline.catch_ups)) == (0, 0)
    assert ids(step(pipeline, 9)) == [1]


def test_removed_objects_leave_nothing_behind(make: Callable[..., Pipeline]) -> None:
    pipeline = make()
    step(pipeline, *range(5))
    for _ in range(9):
        known = pipeline.add(CENTRE, seq=1)
        pipeline.catch_ups.advance()
        pipeline.remove(known.id)
        known = pipeline.add(CENTRE)
        step(pipeline, 5)
        pipeline.refine(known.id, BOX, seq=2)
        pipeline.reset()
    assert (pipeline.objects, pipeline.catch_ups.behind) == ([], 0)
    assert [pipeline.add(CENTRE, seq=2).id for _ in range(4)] == [19, 20, 21, 22]
    with refuses(CapacityError, field=("4", "slots")):
        pipeline.add(CENTRE, seq=2)


def test_more_corrections_than_rows_are_refused(make: Callable[..., Pipeline]) -> None:
    pipeline = make(max_objects=8)
    step(pipeline, 0)
    for _ in range(8):
        pipeline.add(CENTRE)
    step(pipeline, *range(1, 5))
    for object_id in range(1, MAX_CORRECTIONS + 1):
        pipeline.refine(object_id, BOX, seq=2)
    with refuses(CapacityError, field=("past", "frames")):
        pipeline.refine(8, BOX, seq=2)
    pipeline.refine(1, CENTRE, seq=3)
    assert ids(step(pipeline, 5)) == list(range(1, 9))
    pipeline.catch_ups.end_all()
    pipeline.refine(8, BOX, seq=2)


def test_an_object_that_cannot_catch_up_stops_nothing(
    make: Callable[..., Pipeline], model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    pipeline = make(feature_cache_s=0.4)
    step(pipeline, 0)
    pipeline.add(BOX)
    step(pipeline, *range(1, 6))
    pipeline.add(CENTRE, seq=3)
    pipeline.refine(1, CENTRE, seq=3)
    with monkeypatch.context() as fault:
        fault.setattr(model.decode_stage, "forward", run_out_of_memory)
        reported = [pipeline.catch_ups.advance() for _ in range(2)]
    assert {(found.id, found.error) for found in reported if found} == {
        (1, "RuntimeError: out of memory"),
        (2, "RuntimeError: out of memory"),
    }
    assert ids(step(pipeline, 6)) == [1]
    assert pipeline.catch_ups.advance() is None


def test_an_object_on_its_way_goes_on_from_a_checkpoint(make: Callable[..., Pipeline]) -> None:
    first = make()
    second = make()
    step(first, *range(9))
    first.add(CENTRE, seq=2)
    first.add(BOX, seq=8)
    step(first, 9)
    first.refine(2, NEGATIVE, seq=8)
    first.catch_ups.advance()
    second.restore(reload(first.state()))
    assert second.prompting.cache_usage == first.prompting.cache_usage
    for pipeline in (first, second):
        pipeline.catch_ups.end_all()
    assert results(second, range(10, 13)) == results(first, range(10, 13))
    assert pack(second.state()) == pack(first.state())

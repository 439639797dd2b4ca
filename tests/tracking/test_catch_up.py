"""An object that was prompted on a past frame is tracked through the frames since then, beside the steps."""

import pytest
import torch

from sam3_node.errors import CapacityError, RequestError, UnknownObjectError
from sam3_node.models import Features, TrackerModel
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.refuses import refuses
from tests.support.tiny import noise_clip, tiny_model

FRAMES = 30
PROMPTED = 3
NOW = 24
A = ObjectPrompt(1, points=[[15.0, 20.0]])
B = ObjectPrompt(2, box=[10.0, 15.0, 35.0, 45.0])


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    """Return a tiny random tracker that always finds its objects in view."""
    return tiny_model(presence=60.0, hidden=64, size=56)


@pytest.fixture(scope="module")
def clip(model: TrackerModel) -> list[Features]:
    return [model.encode(pixels) for pixels in noise_clip(model.image_size, FRAMES)]


def track_live(tracker: Tracker, clip: list[Features], prompt: ObjectPrompt) -> list[torch.Tensor]:
    """Prompt on the frame PROMPTED when it is the newest; return the logits from NOW on."""
    found = []
    for number, features in enumerate(clip):
        tracks = tracker.step_features(features, [prompt] if number == PROMPTED else [])
        if number >= NOW:
            assert tracks.visible.all()
            found.append(tracks.logits[tracks.ids.index(prompt.object_id)])
    return found


@pytest.mark.parametrize("selection", ["recent", "confident", "distractor"])
def test_an_object_that_caught_up_is_the_one_of_a_live_prompt(
    model: TrackerModel, clip: list[Features], selection: str
) -> None:
    """Bit for bit, though some of the work was done between steps that went on."""
    expected = track_live(Tracker(model, selection=selection), clip, A)
    tracker = Tracker(model, selection=selection, history=1)
    for features in clip[: NOW - 4]:
        tracker.step_features(features)
    tracker.begin_catch_up(clip[PROMPTED], PROMPTED, A)
    way = iter(range(PROMPTED + 1, NOW))
    for number in range(NOW - 4, NOW):
        assert tracker.step_features(clip[number]).ids == []
        for past in (next(way), next(way), next(way)):
            assert tracker.catch_up(1, clip[past], past) is not None
    for past in way:
        tracker.catch_up(1, clip[past], past)
    tracker.join(1)
    found = [tracker.step_features(features).logits[0] for features in clip[NOW:]]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_corrected_object_is_tracked_as_before_until_it_joins(
    model: TrackerModel, clip: list[Features]
) -> None:
    untouched = Tracker(model)
    tracker = Tracker(model, corrections=1)
    correction = ObjectPrompt(1, points=[[45.0, 40.0]])
    for number, features in enumerate(clip):
        steps = [each.step_features(features, [A, B] if number == 0 else []) for each in (untouched, tracker)]
        if number == 9:
            tracker.begin_catch_up(clip[5], 5, correction)
        if 9 <= number < 14:
            assert tracker.catch_up(1, clip[number - 3], number - 3) is not None
        if number == 14:
            tracker.join(1)
        assert [tracks.ids for tracks in steps] == [[1, 2]] * 2
        assert torch.equal(steps[0].logits, steps[1].logits) or number > 14
    assert not torch.allclose(steps[0].logits[0], steps[1].logits[0], atol=0.1)
    assert torch.allclose(steps[0].logits[1], steps[1].logits[1], atol=2e-4)


def test_a_second_prompt_begins_again_and_keeps_the_first(model: TrackerModel, clip: list[Features]) -> None:
    """The work that was done before the second prompt leaves no trace."""

    def prompt_twice(work: int, keep: bool = True) -> list[torch.Tensor]:
        tracker = Tracker(model)
        tracked = []
        for features in clip[:NOW]:
            tracker.step_features(features)
        if keep:
            tracker.begin_catch_up(clip[8], 8, ObjectPrompt(1, points=[[30.0, 35.0]]))
        for past in range(9, 9 + work):
            tracker.catch_up(1, clip[past], past)
        tracker.begin_catch_up(clip[3], 3, A)
        for past in range(4, NOW):
            tracked += [past] if tracker.catch_up(1, clip[past], past) else []
        assert tracked == [past for past in range(4, NOW) if past != 8 or not keep]
        tracker.join(1)
        return [tracker.step_features(features).logits for features in clip[NOW:]]

    expected = prompt_twice(0)
    assert all(torch.equal(*pair) for pair in zip(prompt_twice(NOW - 9), expected, strict=True))
    assert not torch.allclose(prompt_twice(0, keep=False)[0], expected[0], atol=0.1)


def test_corrections_have_rows_of_their_own(model: TrackerModel, clip: list[Features]) -> None:
    tracker = Tracker(model, max_objects=2, corrections=1)
    for number, features in enumerate(clip[:4]):
        tracker.step_features(features, [A, B] if number == 0 else [])
    before = tracker.bank.nbytes
    for _ in range(3):
        tracker.begin_catch_up(clip[1], 1, A)
        with refuses(CapacityError, field=("1", "corrections")):
            tracker.begin_catch_up(clip[1], 1, B)
        tracker.join(1)
    tracker.begin_catch_up(clip[1], 1, B)
    tracker.give_up(2)
    assert tracker.ids == [1, 2]
    with refuses(CapacityError, field=("1", "0", "2", "slots")):
        tracker.begin_catch_up(clip[1], 1, ObjectPrompt(3, points=[[9.0, 9.0]]))
    tracker.begin_catch_up(clip[1], 1, A)
    tracker.remove(1)
    tracker.begin_catch_up(clip[1], 1, ObjectPrompt(3, points=[[9.0, 9.0]]))
    assert (tracker.ids, tracker.bank.nbytes) == ([2], before)
    tracker.remove(3)
    with refuses(UnknownObjectError, field=("3", "2", "tracked")):
        tracker.remove(3)
    tracker.begin_catch_up(clip[1], 1, ObjectPrompt(3, points=[[9.0, 9.0]]))
    tracker.reset()
    assert tracker.step_features(clip[0], [A, B]).ids == [1, 2]


def test_bad_prompts_change_nothing(model: TrackerModel, clip: list[Features]) -> None:
    tracker = Tracker(model)
    tracker.step_features(clip[0])
    for number, prompt in ((1, A), (-1, A), (0, ObjectPrompt(1)), (0, ObjectPrompt(-1, points=[[1.0, 1.0]]))):
        with pytest.raises(RequestError, match="expected"):
            tracker.begin_catch_up(clip[0], number, prompt)
    with refuses(RequestError, field=("0", "-2")):
        tracker.step_features(clip[0], [ObjectPrompt(-2, points=[[1.0, 1.0]])])
    assert tracker.state().rows.rows == {}

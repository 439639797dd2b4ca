"""Objects followed by their last masks, and the history that judges these masks."""

from collections.abc import Iterable

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from sam3_node.models import TrackerModel
from sam3_node.perception.checkpoint import pack_state, unpack_state
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.saved_tables import put_rows, take_rows
from sam3_node.tracking.track_history import SureHistory
from tests.support.saving import reload
from tests.support.tables import each_row
from tests.support.tiny import noise_clip, random_source

FRAMES = 6


def model_of(presence: float) -> TrackerModel:
    source = random_source("sam2", presence=presence)
    return TrackerModel(source, name="stills", mean=[0.5] * 3, std=[0.5] * 3, has_memory=False)


@pytest.fixture(scope="module")
def model() -> TrackerModel:
    return model_of(60.0)


@pytest.fixture(scope="module")
def clip(model: TrackerModel) -> list[Tensor]:
    return noise_clip(model.image_size, FRAMES)


def mask_prompt(model: TrackerModel, object_id: int, rows: slice, columns: slice) -> ObjectPrompt:
    mask = torch.zeros(model.image_size, model.image_size)
    mask[rows, columns] = 1
    return ObjectPrompt(object_id, mask=mask)


def prompts(model: TrackerModel) -> list[ObjectPrompt]:
    point = ObjectPrompt(1, points=[[30.0, 40.0]])
    box = ObjectPrompt(2, box=[20.0, 30.0, 70.0, 90.0])
    return [point, box, mask_prompt(model, 3, slice(30, 70), slice(40, 90))]


def test_objects_of_all_prompts_are_followed_alone_as_together(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    together = Tracker(model)
    alone = {prompt.object_id: Tracker(model) for prompt in prompts(model)}
    for number, pixels in enumerate(clip):
        tracks = together.step(pixels, prompts(model) if number == 0 else [])
        for prompt, logits in zip(prompts(model), tracks.logits, strict=True):
            one = alone[prompt.object_id].step(pixels, [prompt] if number == 0 else [])
            assert (one.logits[0] - logits).abs().max() < 1e-4


def test_a_mask_prompt_is_its_own_result(model: TrackerModel, clip: list[Tensor]) -> None:
    tracks = Tracker(model).step(clip[0], prompts(model)[2:])
    inside = tracks.logits[0] > 0
    scale = model.image_size // inside.shape[-1]
    assert inside[40 // scale : 60 // scale, 50 // scale : 80 // scale].all()
    assert inside.sum() < 1.2 * 40 * 50 / scale**2
    assert tracks.visible.all()


def test_a_hidden_object_is_looked_for_where_it_was(model: TrackerModel, clip: list[Tensor]) -> None:
    tracker = Tracker(model)
    tracker.step(clip[0], prompts(model)[1:2])
    expected = Tracker(model)
    expected.restore(reload(tracker.state()))
    bias = model.decode_stage.mask_decoder.presence_head.proj_out.bias
    kept = bias.clone()
    bias.fill_(-60.0)
    assert not tracker.step(clip[1]).visible.any()
    bias.copy_(kept)
    assert torch.equal(tracker.step(clip[2]).logits, expected.step(clip[2]).logits)


def test_a_saved_state_continues_bit_for_bit(model: TrackerModel, clip: list[Tensor]) -> None:
    tracker = Tracker(model)
    again = Tracker(model)
    tracker.step(clip[0], prompts(model))
    tracker.remove(2)
    tracker.step(clip[1])
    again.restore(reload(tracker.state()))
    for pixels in clip[2:]:
        ours = tracker.step(pixels)
        theirs = again.step(pixels)
        assert ours.ids == theirs.ids == [1, 3]
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.pointers, theirs.pointers)


def test_a_correction_replaces_the_last_mask_and_memory_does_not_grow(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    tracker = Tracker(model, max_objects=2)
    size = tracker.bank.nbytes
    tracker.step(clip[0], prompts(model)[:1])
    features = model.encode(clip[1])
    tracker.step_features(features)
    logits, score = tracker.prompt_at(features, 1, ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0]))
    boxed = Tracker(model)
    first = boxed.step_features(features, [ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0])])
    assert torch.equal(logits, first.logits[0])
    assert float(score) >= 0
    assert torch.equal(tracker.step(clip[2]).logits, boxed.step(clip[2]).logits)
    assert tracker.bank.nbytes == size
    pointers, valid = tracker.appearance([1])
    assert pointers.shape == (1, 1, model.hidden)
    assert valid.all()


def test_a_mask_that_jumps_is_withheld_and_its_object_is_searched_from_the_last_sure_mask(
    model: TrackerModel, clip: list[Tensor]
) -> None:
    """On noise, random weights decode masks of the whole image, whatever the prompt was."""
    tracker = Tracker(model)
    fresh = Tracker(model)
    small = mask_prompt(model, 1, slice(40, 60), slice(40, 60))
    tracker.step(clip[0], [small])
    fresh.restore(reload(tracker.state()))
    tracks = tracker.step(clip[1])
    assert not tracks.visible.any()
    assert not (tracks.logits > 0).any()
    assert float(tracks.scores[0]) < 0.01
    prompt = tracker.state().bank.logits
    assert torch.equal(prompt, fresh.state().bank.logits)
    tracker.step(clip[2])
    assert torch.equal(tracker.state().bank.logits, prompt)
    assert tracker.step(clip[3], [small]).visible.all()  # a prompt shows it again


SIDE = 128
Masks = Iterable[np.ndarray]


def disc(x: float, y: float, radius: float) -> np.ndarray:
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    return np.hypot(columns - x, rows - y) <= radius


def box(x0: float, y0: float, x1: float, y1: float) -> np.ndarray:
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    return (columns > x0) & (columns < x1) & (rows > y0) & (rows < y1)


def bar(angle: float, length: float = 40, width: float = 12) -> np.ndarray:
    corners = cv2.boxPoints(((64, 64), (length, width), angle)).astype(np.int32)
    return cv2.fillPoly(np.zeros((SIDE, SIDE), np.uint8), [corners], 1) > 0


class Follower:
    """A history, and the prompts as the tracker chooses them: the last plausible mask, or the last sure one."""

    def __init__(self, first: np.ndarray) -> None:
        self.history = SureHistory(3)
        self.prompt = self.sure = first
        self.frame = 0
        self.history.start(1, 0, first)

    def step(self, mask: np.ndarray, quality: float = 0.9, frames: int = 1) -> bool:
        """Return True if the mask is plausible."""
        self.frame += frames
        plausible, sure = self.history.judge(1, self.frame, mask, self.prompt, quality)
        self.sure = mask if sure else self.sure
        self.prompt = mask if plausible else self.sure
        return plausible

    def run(self, masks: Masks, quality: float = 0.9, frames: int = 1) -> list[bool]:
        return [self.step(mask, quality, frames) for mask in masks]


def follow(masks: Masks, frames: int = 1) -> list[bool]:
    first, *others = masks
    return Follower(first).run(others, frames=frames)


HALF = box(40, 40, 60, 60)
WHOLE = box(40, 40, 80, 60)
PLAUSIBLE = {
    "stays": [disc(64, 64, 10)] * 60,
    "moves": [disc(15 + 5 * n, 64, 10) for n in range(20)],
    "turns": [bar(9 * n) for n in range(40)],
    "comes nearer": [disc(64, 64, 8 * 3 ** (n / 75)) for n in range(75)],
    "comes nearer quickly": [disc(64, 64, 8 * 3 ** (n / 30)) for n in range(30)],
    "goes away": [disc(64, 64, 40 * 3 ** (-n / 50)) for n in range(50)],
    "comes nearer and turns": [bar(4 * n, 24 * 1.02**n, 12 * 1.02**n) for n in range(40)],
    "comes over the edge": [disc(-14 + n, 60, 20) for n in range(60)],
    "is pushed over the edge": [box(0, 40, 2 + 2 * n, 80) for n in range(30)],
    "crosses the edge": [disc(1.5 * n - 4, 64, 8) for n in range(60)],
    "leaves over the edge": [disc(100 + n, 60, 15) for n in range(42)],
    "was half hidden": [WHOLE] * 10 + [HALF] * 40 + [WHOLE] * 10,
    "is covered and shown": [
        disc(64, 64, 15),
        *(disc(64, 64, 15) & ~box(0, 0, 52 + n, 128) for n in range(20)),
    ],
    "is small": [box(60, 60, 62 + n % 4, 62 + n % 3) for n in range(40)],
}


@each_row("object_that", PLAUSIBLE)
def test_what_an_object_may_do_is_followed(object_that):
    assert all(follow(PLAUSIBLE[object_that]))


def test_frames_that_are_left_out_widen_what_is_plausible():
    near = [disc(64, 64, 8 * 1.03**n) for n in range(0, 60, 6)]
    assert all(follow(near, frames=6))
    assert all(follow((disc(20 + 12 * n, 64, 10) for n in range(8)), frames=6))


def test_a_jump_of_area_is_withheld_while_it_lasts_and_the_object_is_found_again():
    follower = Follower(box(60, 60, 75, 72))
    assert all(follower.run([box(60, 60, 75, 72)] * 10))
    assert not any(follower.run([box(40, 40, 100, 100)] * 60))
    assert (follower.prompt == box(60, 60, 75, 72)).all()
    assert all(follower.run([box(61, 60, 76, 72)] * 10))


@pytest.mark.parametrize(
    ("whole", "jumped", "back"),
    [
        ((64, 64, 20), (64, 64, 5), (64, 64, 19)),  # to a small part
        ((30, 64, 8), (90, 64, 8), (32, 64, 8)),  # of place
    ],
)
def test_a_jump_is_withheld(whole, jumped, back):
    follower = Follower(disc(*whole))
    assert all(follower.run([disc(*whole)] * 5))
    assert not any(follower.run([disc(*jumped)] * 40))
    assert follower.step(disc(*back))


@pytest.mark.parametrize("frames", [19, 30, 40])
def test_a_mask_that_creeps_over_its_surroundings_is_withheld(frames):
    """Each step is small: a book becomes the table, and then the whole image."""
    first = 15 * 12

    def grown(n: int) -> np.ndarray:
        share = n / frames
        return box(60 - 60 * share, 60 - 60 * share, 75 + 53 * share, 72 + 56 * share)

    masks = [grown(n) for n in range(frames + 1)]
    shown = [mask.sum() / first for mask, kept in zip(masks[1:], follow(masks), strict=True) if kept]
    assert max(shown) < 4.2
    assert len(shown) < frames / 2


def test_a_mask_that_creeps_to_one_side_is_withheld_early():
    masks = [box(20, 50, 40 + 3 * n, 70) for n in range(30)]
    kept = follow(masks)
    assert max(mask.sum() for mask, shown in zip(masks[1:], kept, strict=True) if shown) < 3 * masks[0].sum()
    assert not any(kept[15:])


def test_an_object_that_has_been_whole_does_not_grow_at_the_edge():
    follower = Follower(box(80, 60, 95, 72))
    assert all(follower.run(box(80 + n, 60, 95 + n, 72) for n in range(1, 39)))
    assert not any(follower.run([box(40, 30, 128, 110)] * 20))


def test_doubtful_masks_do_not_change_the_history():
    """The quality falls to half while the mask creeps: the bound stays, and the prompt goes back to the sure mask."""
    follower = Follower(disc(64, 64, 10))
    assert all(follower.run([disc(64, 64, 10)] * 10))
    bound = take_rows(follower.history, [1])["bound"]
    follower.run((disc(64, 64, 10 * 1.02**n) for n in range(30)), quality=0.4)
    assert (take_rows(follower.history, [1])["bound"] == bound).all()
    assert not follower.step(disc(64, 64, 20), quality=0.4)
    assert (follower.prompt == disc(64, 64, 10)).all()


def test_a_prompt_begins_the_history_again():
    follower = Follower(disc(64, 64, 8))
    assert not follower.step(disc(64, 64, 40))
    follower.history.start(1, follower.frame, disc(64, 64, 40))
    follower.prompt = follower.sure = disc(64, 64, 40)
    assert follower.step(disc(64, 64, 40))


def test_what_is_saved_goes_on_the_same():
    masks = [disc(40 + n, 64, 10 * 1.02**n) for n in range(20)] + [disc(60, 64, 40)] * 3
    follower = Follower(masks[0])
    other = Follower(disc(1, 1, 1))
    follower.run(masks[1:8])
    saved = unpack_state(pack_state(take_rows(follower.history, [1])))
    put_rows(other.history, [1], saved)
    other.prompt = follower.prompt
    other.sure = follower.sure
    other.frame = follower.frame
    assert other.run(masks[8:]) == follower.run(masks[8:])
    again = take_rows(other.history, [1])
    assert all((value == again[name]).all() for name, value in take_rows(follower.history, [1]).items())

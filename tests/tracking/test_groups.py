"""Objects of SAM 3.1, which share memories in groups of 16."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from sam3_node.errors import CapacityError, SettingsError, UnknownObjectError
from sam3_node.models.sam.stages import Decoded
from sam3_node.models.sam31 import random_model
from sam3_node.models.sam31.model import Sam31Model
from sam3_node.tracking import ObjectPrompt, Tracker, Tracks
from sam3_node.tracking.groups import MERGE_GAP, GroupMemory, GroupSlots, score_groups
from sam3_node.tracking.propagation import PRESENT_LOGIT
from tests.support.saving import reload

SIZE = 56


@pytest.fixture(scope="module")
def model() -> Sam31Model:
    return random_model(SIZE, 32)


def frames(seed: int = 0) -> Iterator[Tensor]:
    """Yield pictures in which everything moves."""
    base = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    number = 0
    while True:
        yield torch.roll(base, (number, 2 * number), (2, 3))
        number += 1


def prompts(ids: Sequence[int]) -> list[ObjectPrompt]:
    return [ObjectPrompt(i, points=[[3 + 5 * i % 50, 4 + 11 * i % 48]]) for i in ids]


def members(tracker: Tracker) -> list[list[int]]:
    group_slots = tracker._rows
    assert isinstance(group_slots, GroupSlots)
    return [group_slots.members(group) for group in group_slots.shared_groups()]


def equal(one: Tracks, other: Tracks) -> bool:
    return one.ids == other.ids and torch.equal(one.logits, other.logits)


def iou(one: Tensor, other: Tensor) -> float:
    union = ((one > 0) | (other > 0)).sum()
    return float(((one > 0) & (other > 0)).sum() / union) if union else 1.0


def test_a_seventeenth_object_opens_a_group(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=40)
    pictures = frames()
    tracks = tracker.step(next(pictures), prompts(range(17)))
    assert tracks.ids == list(range(17))
    assert members(tracker) == [list(range(16)), [16]]
    assert tracker.step(next(pictures)).ids == list(range(17))
    with pytest.raises(CapacityError):
        tracker.step(next(pictures), prompts(range(17, 41)))


def test_objects_of_two_groups_are_followed_as_in_one_alone(model: Sam31Model) -> None:
    """Objects of one group do not see those of another one."""
    both = Tracker(model, max_objects=32)
    first = Tracker(model, max_objects=32)
    for number, picture in zip(range(6), frames(), strict=False):
        new = prompts(range(18)) if number == 0 else []
        together = both.step(picture, new)
        alone = first.step(picture, new[:16])
        assert alone.ids == together.ids[:16]
        torch.testing.assert_close(together.logits[:16], alone.logits, rtol=1e-4, atol=1e-4)


def test_ids_and_order_do_not_depend_on_slots(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=32)
    pictures = frames()
    tracker.step(next(pictures), prompts([7, 3, 9]))
    tracker.remove(3)
    tracks = tracker.step(next(pictures), prompts([3]))
    assert tracks.ids == [7, 9, 3]
    # the slot that was left is not given again: older memories still show what it held
    assert members(tracker) == [[7, 9, 3]]
    with pytest.raises(UnknownObjectError):
        tracker.remove(4)


def test_an_object_that_is_added_changes_no_mask_of_its_frame(model: Sam31Model) -> None:
    """It shares the memory from the next frame on; random weights cannot say how well the others are followed then."""
    tracker = Tracker(model, max_objects=16)
    undisturbed = Tracker(model, max_objects=16)
    pictures = frames()
    for number in range(8):
        picture = next(pictures)
        expected = undisturbed.step(picture, prompts(range(3)) if number == 0 else [])
        new = {0: prompts(range(3)), 4: prompts([3])}
        found = tracker.step(picture, new.get(number, []))
        assert found.ids[:3] == expected.ids
        assert torch.equal(found.logits[:3], expected.logits) == (number <= 4)


def test_a_prompt_takes_effect_on_the_newest_frame(model: Sam31Model) -> None:
    """As a live node does it: the frame is tracked already, and its other objects keep their masks on it."""
    live = Tracker(model, max_objects=16, history=1)
    at_once = Tracker(model, max_objects=16, history=1)
    pictures = frames()
    for tracker in (live, at_once):
        tracker.step(next(frames()), prompts(range(2)))
    next(pictures)
    picture = next(pictures)
    live.step(picture)
    logits, _ = live.prompt_at(model.encode(picture), 1, prompts([2])[0])
    both = at_once.step(picture, prompts([2]))
    # a batch of another size adds up in another order on some processors
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(logits, both.logits[2])
    for _ in range(3):
        picture = next(pictures)
        close(live.step(picture).logits, at_once.step(picture).logits)


def test_a_tracked_frame_is_corrected(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=16, history=1)
    pictures = frames()
    tracker.step(next(pictures), prompts(range(3)))
    picture = next(pictures)
    before = tracker.step(picture)
    logits, _ = tracker.prompt_at(model.encode(picture), 1, ObjectPrompt(1, points=[[40.0, 40.0]]))
    assert not torch.equal(logits, before.logits[1])
    after = tracker.step(next(pictures))
    assert after.ids == [0, 1, 2]


def test_a_mask_is_its_own_result(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=16)
    mask = torch.zeros(SIZE, SIZE)
    mask[10:30, 14:38] = 1
    pictures = frames()
    tracks = tracker.step(
        next(pictures), [ObjectPrompt(0, mask=mask), ObjectPrompt(1, mask=torch.zeros_like(mask))]
    )
    small = torch.nn.functional.interpolate(mask[None, None], tracks.logits.shape[-2:], mode="area")[0, 0]
    assert iou(tracks.logits[0], small - 0.5) > 0.8
    assert tracks.presence.tolist() == [PRESENT_LOGIT, -PRESENT_LOGIT]
    assert tracks.visible.tolist() == [True, False]
    assert tracker.step(next(pictures)).ids == [0, 1]


def test_a_frame_is_encoded_from_the_masks_of_prompts_themselves(model: Sam31Model) -> None:
    """Also anew, for another prompt on it. Their logits have a quarter of the image's size, and are coarser."""
    tracker = Tracker(model, max_objects=8)
    bank = tracker.bank
    assert isinstance(bank, GroupMemory)
    picture = next(frames())
    # a pattern that logits do not show
    stripes = torch.zeros(2, SIZE, SIZE)
    stripes[0, :, ::2] = 1
    stripes[1, ::2] = 1
    shown = [ObjectPrompt(number, mask=mask) for number, mask in enumerate(stripes)]
    tracker.step(picture, shown[:1])
    saved = reload(tracker.state())
    features = model.encode(picture)
    clicked, _ = tracker.prompt_at(features, 0, prompts([2])[0])
    tracker.prompt_at(features, 0, shown[1])

    @torch.inference_mode()
    def encode(fine: bool) -> Tensor:
        logits = torch.zeros(1, model.slots, *model.mask_size)
        presence = torch.full((1, model.slots), -10.0)
        flags = torch.zeros(1, model.slots, dtype=torch.bool)
        flags[0, :3] = True
        presence[0, :3] = torch.tensor([1.0, float(clicked.max() > -1000), 1.0])
        coarse = [model.memory_encoder.from_mask(mask[None, None]) for mask in stripes]
        logits[0, :3] = torch.stack([coarse[0][0][0], clicked, coarse[1][0][0]])
        masks = model.memory_encoder.weigh(logits)
        if fine:
            masks[0, [0, 2]] = torch.cat([mask[0] for _, mask in coarse])
        return model.memory_encoder.encode(features.top, masks, presence, flags)[0]

    found = bank.bank.memory_at(0, 0)
    torch.testing.assert_close(found, encode(fine=True), rtol=1e-4, atol=1e-4)
    assert (found - encode(fine=False)).abs().max() > 1e-3
    # a node that was restarted between the prompts has them, too
    other = Tracker(model, max_objects=8)
    other.restore(saved)
    for prompt in (*prompts([2]), shown[1]):
        other.prompt_at(features, 0, prompt)
    assert isinstance(other.bank, GroupMemory)
    assert other.bank.bank.memory_at(0, 0).equal(found)
    # they are kept while a prompt may need them
    assert bank._fine
    for _ in range(5):
        tracker.step(picture)
    assert not bank._fine


def test_groups_are_merged_when_their_objects_fit_into_one(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=32)
    pictures = frames()
    tracker.step(next(pictures), prompts(range(20)))
    for object_id in range(2, 14):
        tracker.remove(object_id)
    moved: list[int] = []
    for _ in range(MERGE_GAP + 1):
        tracks = tracker.step(next(pictures))
        moved += tracker.take_moved()
    assert tracks.ids == [0, 1, *range(14, 20)]
    assert len(members(tracker)) == 1
    assert sorted(moved) == [16, 17, 18, 19] or sorted(moved) == [0, 1, 14, 15]
    assert tracker.take_moved() == []


def test_slots_of_objects_that_left_come_back(model: Sam31Model) -> None:
    """Objects come and go for longer than a group has slots; memory and groups stay what they were."""
    tracker = Tracker(model, max_objects=16)
    before = tracker.bank.nbytes
    pictures = frames()
    tracker.step(next(pictures), prompts(range(15)))
    for newest in range(15, 90):
        tracks = tracker.step(next(pictures), prompts([newest]))
        assert tracks.ids == [*range(newest - 15, newest + 1)]
        tracker.remove(newest - 15)
    assert tracker.bank.nbytes == before


def test_a_saved_state_continues_bit_for_bit(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=32, history=1)
    pictures = frames()
    tracker.step(next(pictures), prompts(range(18)))
    for object_id in (2, 17):
        tracker.remove(object_id)
    for _ in range(3):
        tracker.step(next(pictures))
    other = Tracker(model, max_objects=32, history=1)
    other.restore(reload(tracker.state()))
    for number in range(MERGE_GAP):
        picture = next(pictures)
        new = prompts([40]) if number == 2 else []
        assert equal(tracker.step(picture, new), other.step(picture, new))
    assert members(tracker) == members(other)


def test_an_object_catches_up_apart_and_joins(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=16, history=1, corrections=1)
    pictures = [picture for picture, _ in zip(frames(), range(12), strict=False)]
    tracker.step(pictures[0], prompts(range(2)))
    for picture in pictures[1:8]:
        tracker.step(picture)
    tracker.begin_catch_up(model.encode(pictures[2]), 2, prompts([5])[0])
    for number in range(3, 8):
        assert tracker.catch_up(5, model.encode(pictures[number]), number) is not None
    tracker.join(5)
    assert tracker.step(pictures[8]).ids == [0, 1, 5]
    assert members(tracker) == [[0, 1], [5]]
    # a correction of a tracked object, which keeps its conditioning frames, and one that is given up
    tracker.begin_catch_up(model.encode(pictures[3]), 3, ObjectPrompt(1, points=[[20.0, 20.0]]))
    assert tracker.catch_up(1, model.encode(pictures[4]), 4) is not None
    tracker.join(1)
    assert tracker.step(pictures[9]).ids == [0, 1, 5]
    tracker.begin_catch_up(model.encode(pictures[3]), 3, ObjectPrompt(0, points=[[20.0, 20.0]]))
    tracker.give_up(0)
    assert tracker.step(pictures[10]).ids == [0, 1, 5]


def test_an_object_that_is_held_back_is_followed_with_its_group(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=16)
    plain = Tracker(model, max_objects=16)
    for number, picture in zip(range(6), frames(), strict=False):
        new = prompts(range(3)) if number == 0 else []
        held = [1] if number in (2, 3) else []
        tracks = tracker.step_features(model.encode(picture), new, held)
        expected = plain.step_features(model.encode(picture), new)
        assert tracks.ids == [i for i in expected.ids if i not in held]
        for object_id, logits in zip(tracks.ids, tracks.logits, strict=True):
            assert torch.equal(logits, expected.logits[expected.ids.index(object_id)])


def test_appearance_is_of_the_prompted_frames(model: Sam31Model) -> None:
    tracker = Tracker(model, max_objects=16)
    pictures = frames()
    first = tracker.step(next(pictures), prompts(range(2)))
    tracker.step(next(pictures), prompts([2]))
    pointers, valid = tracker.appearance([1, 2])
    assert valid.sum(dim=1).tolist() == [1, 1]
    torch.testing.assert_close(pointers[0][valid[0]][0], first.pointers[1])


def test_anchors_are_of_one_object(model: Sam31Model) -> None:
    with pytest.raises(SettingsError, match="distractor"):
        Tracker(model, selection="distractor")
    tracker = Tracker(model, selection="confident")
    pictures = frames()
    tracker.step(next(pictures), prompts(range(2)))
    for _ in range(10):
        tracks = tracker.step(next(pictures))
    assert tracks.ids == [0, 1]
    assert isinstance(tracker.bank, GroupMemory)


def test_a_group_is_judged_by_the_mean_of_its_objects_in_view() -> None:
    presence = torch.tensor([[9.0, 0.5, -3.0, 9.0], [9.0, 9.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0]])
    iou = torch.tensor([[0.9, 0.6, 0.8, 0.7], [0.9, 0.9, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]])
    seen = np.array([[True, True, True, False], [False] * 4])
    decoded = Decoded(torch.zeros(3, 4, 8, 8), iou, presence, torch.zeros(3, 4, 2))
    # the reference: of objects alone, whose score is 0 while they are out of view
    objects = torch.where(presence > 0, presence.sigmoid() * 2 - 1, 0)[0, :3] * iou[0, :3]
    scores = score_groups(decoded, seen)
    torch.testing.assert_close(scores, torch.stack([objects.mean(), torch.tensor(0.0)]))

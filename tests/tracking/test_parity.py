"""Our batched bank against transformers' streaming inference: the same logits at every frame and object."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.tiny import TRAINED_LOGIT, Oracle, find_largest_logit, noise_clip, random_source, stages_of

TOLERANCE = 1e-3
SIZES = {"sam3": 112, "sam2": 128, "edgetam": 128}


def three_objects(size: int) -> dict[int, ObjectPrompt]:
    """Three objects enter by point, box and mask; the first is corrected by two points."""
    mask = torch.zeros(size, size)
    mask[size // 4 : size // 2, size // 3 : size // 2 + 9] = 1
    return {
        0: ObjectPrompt(1, points=[[30.0, 40.0]], labels=[1]),
        6: ObjectPrompt(2, box=[20.0, 30.0, 70.0, 90.0]),
        15: ObjectPrompt(3, mask=mask),
        24: ObjectPrompt(1, points=[[50.0, 44.0], [10.0, 80.0]], labels=[1, 0]),
    }


def oracle_prompt(prompt: ObjectPrompt) -> dict[str, Tensor]:
    if prompt.mask is not None:
        return {"mask": prompt.mask}
    tensors = prompt.to_tensors(0, torch.device("cpu"))
    return {"points": tensors.points, "labels": tensors.labels}


def compare(
    family: str, prompts: dict[int, ObjectPrompt], frames: int, removals: dict[int, int]
) -> dict[bool, int]:
    """Step both over a clip, comparing all logits; -> on how many frames objects were in view, and not."""
    source = random_source(family)
    model = stages_of(source)
    tracker = Tracker(model, max_objects=4)
    oracle = Oracle(source)
    seen = {True: 0, False: 0}
    largest = 0.0
    for frame, pixels in enumerate(noise_clip(model.image_size, frames)):
        if frame in removals:
            tracker.remove(removals[frame])
            oracle.remove(removals[frame])
        prompt = prompts.get(frame)
        tracks = tracker.step(pixels, [prompt] if prompt else [])
        truth = oracle.step(pixels, {prompt.object_id: oracle_prompt(prompt)} if prompt else {})
        assert tracks.ids == list(truth)
        for object_id, logits, visible in zip(tracks.ids, tracks.logits, tracks.visible, strict=True):
            error = (logits - truth[object_id]).abs().max().item()
            assert error < TOLERANCE, f"frame {frame}, object {object_id}: off by {error}"
            seen[bool(visible)] += 1
        largest = max(largest, find_largest_logit(tracks))
    assert largest >= TRAINED_LOGIT
    return seen


@pytest.mark.verifies(
    "network",
    "SAM 3, SAM 2.1, EdgeTAM: video",
    "own package",
    "transformers, logits within 0.001",
    "public weights of the video models",
)
@pytest.mark.parametrize("family", ["sam3", "sam2", "edgetam"])
def test_equals_transformers_streaming_inference(family: str) -> None:
    # longer than the 16 frames of object pointers
    seen = compare(family, three_objects(SIZES[family]), frames=36, removals={30: 2})
    assert min(seen.values()) > 5, "the clip must show objects in view and out of view"


def test_more_corrections_than_conditioning_slots() -> None:
    """SAM 3 attends to four conditioning frames; older ones count as plain memories while they are recent."""
    frames = (0, 2, 3, 5, 6, 8, 9, 15)
    prompts = {frame: ObjectPrompt(1, points=[[30.0 + 4 * frame, 40.0]]) for frame in frames}
    seen = compare("sam3", prompts, frames=20, removals={})
    assert sum(seen.values()) == 20


def test_a_prompt_on_a_past_frame_equals_one_given_in_time() -> None:
    source = random_source("sam3")
    model = stages_of(source)
    clip = noise_clip(model.image_size, 12)
    tracker = Tracker(model)
    oracle = Oracle(source)
    kept = [model.encode(pixels) for pixels in clip]
    for features in kept[:7]:
        tracker.step_features(features)
    prompt = ObjectPrompt(5, box=[20.0, 30.0, 70.0, 90.0])
    logits, _ = tracker.prompt_at(kept[4], 4, prompt)
    oracle.frame = 4
    truth = oracle.step(clip[4], {5: oracle_prompt(prompt)})
    assert (logits - truth[5]).abs().max() < TOLERANCE
    oracle.frame = 7
    for features, pixels in zip(kept[7:], clip[7:], strict=True):
        tracks = tracker.step_features(features)
        truth = oracle.step(pixels, {})
        assert (tracks.logits[0] - truth[5]).abs().max() < TOLERANCE


@pytest.mark.verifies(
    "network", "SAM 3, SAM 2.1, EdgeTAM: video", "own package", "also corrections of past frames"
)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, kind) for family in ("sam3", "sam2") for kind in ("points", "one point", "box", "mask")),
        ("edgetam", "points"),
        ("edgetam", "mask"),
    ],
)
def test_corrections_of_tracked_frames_equal_transformers(family: str, kind: str) -> None:
    """A correction reads the memory before its frame, and the frame does not become a conditioning frame."""
    source = random_source(family)
    model = stages_of(source)
    size = model.image_size
    mask = torch.zeros(size, size)
    mask[size // 4 : size // 2, size // 3 : size // 2 + 9] = 1
    correction = {
        "points": ObjectPrompt(1, points=[[50.0, 44.0], [10.0, 80.0]], labels=[1, 0]),
        "one point": ObjectPrompt(1, points=[[60.0, 70.0]]),
        "box": ObjectPrompt(1, box=[20.0, 30.0, 70.0, 90.0]),
        "mask": ObjectPrompt(1, mask=mask),
    }[kind]
    tracker = Tracker(model, history=4)
    oracle = Oracle(source)
    kept = []
    largest = 0.0
    for frame, pixels in enumerate(noise_clip(size, 26)):
        kept.append((model.encode(pixels), pixels))
        prompts = [ObjectPrompt(1, points=[[30.0, 40.0]])] if frame in (0, 13) else []
        tracks = tracker.step_features(kept[-1][0], prompts)
        truth = oracle.step(pixels, {prompt.object_id: oracle_prompt(prompt) for prompt in prompts})
        assert (tracks.logits[0] - truth[1]).abs().max() < TOLERANCE, f"frame {frame}"
        for past in {8: [8], 12: [9, 9, 11], 20: [17, 13, 18]}.get(frame, ()):
            features, past_pixels = kept[past]
            logits, _ = tracker.prompt_at(features, past, correction)
            oracle.frame = past
            truth = oracle.step(past_pixels, {1: oracle_prompt(correction)})
            oracle.frame = frame + 1
            assert (logits - truth[1]).abs().max() < TOLERANCE, f"frame {past}, corrected after {frame}"
        largest = max(largest, find_largest_logit(tracks))
    assert largest >= TRAINED_LOGIT


def test_points_with_the_mask_so_far_equal_the_reference_decoder() -> None:
    source = random_source("sam3")
    model = stages_of(source)
    pixels = noise_clip(model.image_size, 1)[0]
    so_far = torch.randn(model.mask_size, generator=torch.Generator().manual_seed(3))
    prompt = ObjectPrompt(1, points=[[50.0, 44.0], [10.0, 80.0]], labels=[1, 0], logits=so_far)
    logits, _ = Tracker(model).segment(model.encode(pixels), prompt)
    with torch.inference_mode():
        truth = source._single_frame_forward(
            image_embeddings=source.get_image_embeddings(pixels),
            input_points=torch.tensor([[[[50.0, 44.0], [10.0, 80.0]]]]),
            input_labels=torch.tensor([[[1, 0]]]),
            input_masks=so_far[None, None],
            multimask_output=False,
        ).pred_masks[0, 0]
    assert (logits - truth).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["sam3", "sam2", "edgetam"])
@pytest.mark.parametrize("place", [{"points": [[30.0, 40.0]]}, {"box": [20.0, 30.0, 70.0, 90.0]}])
def test_each_mask_to_choose_from_equals_transformers_and_is_tracked_as_there(
    family: str, place: dict
) -> None:
    source = random_source(family)
    model = stages_of(source)
    clip = noise_clip(model.image_size, 5)
    prompt = ObjectPrompt(1, **place).to_tensors(0, torch.device("cpu"))
    logits, scores = Tracker(model).segment_candidates(model.encode(clip[0]), prompt)
    assert len(logits) == model.candidates == 3
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)
    source.config.multimask_max_pt_num = 2  # so that masks compete for a box, too
    largest = 0.0
    for choice, found in enumerate(logits):
        tracker = Tracker(model)
        oracle = Oracle(source)
        hook = source.mask_decoder.register_forward_hook(prefer(choice))
        truth = oracle.step(clip[0], {1: {"points": prompt.points, "labels": prompt.labels}})[1]
        hook.remove()
        assert (found - truth).abs().max() < TOLERANCE
        followed = [tracker.step(clip[0], [prompt._replace(choice=choice)])]
        followed += [tracker.step(pixels) for pixels in clip[1:]]
        truths = [truth, *(oracle.step(pixels, {})[1] for pixels in clip[1:])]
        for tracks, truth in zip(followed, truths, strict=True):
            assert (tracks.logits[0] - truth).abs().max() < TOLERANCE
            largest = max(largest, find_largest_logit(tracks))
    assert largest >= TRAINED_LOGIT
    assert (logits[0] - logits[1]).abs().max() > 1


def prefer(choice: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a hook that lets the reference's decoder prefer the mask of this rank."""

    def rank(_: object, __: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        masks, iou, *others = output
        preferred = torch.zeros_like(iou)
        preferred[..., iou.argsort(descending=True).flatten()[choice]] = 1
        return masks, preferred, *others

    return rank

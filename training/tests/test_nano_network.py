"""The training forward is the forward that is used: transformers' and the package's own; losses, prompts and Muon."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Sam2VideoInferenceSession

from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.models.weight_files import IMAGENET
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.tiny import noise_clip
from training.nano.data import Batch
from training.nano.muon import LIKE_ADAM, Muon, orthogonalise
from training.nano.network import (
    IMAGES,
    SIZE,
    Decoded,
    Features,
    Memory,
    TrainingTracker,
    hide,
    mask_logits,
    nano_config,
    new_tracker,
)
from training.nano.steps import (
    ABSENT,
    BACKGROUND,
    CELL,
    boxes,
    clip_cost,
    corrections,
    cost,
    normalise,
    overlap,
    points,
    presence_of,
    total,
)

TOLERANCE = 1e-3
ENCODER_TOLERANCE = 1e-5
"""Largest difference to transformers' encoder, as a share of the largest feature."""
STREAM_TOLERANCE = 2e-3
"""The same of logits after ten frames."""
FRAMES = 5
BOX = [60.0, 60.0, 150.0, 140.0]
CORNER_LABELS = torch.tensor([[2, 3]], dtype=torch.int32)
POINT = [100.0, 90.0]

# what a prompt gives, the logits to remember, and which candidate they are
Answer = tuple[Decoded, Tensor, int]


@pytest.fixture(scope="module")
def source() -> Any:
    """Random weights that see the object on every frame."""
    return seeing(new_tracker(nano_config()).eval())


@pytest.fixture(scope="module")
def net(source: Any) -> TrainingTracker:
    return TrainingTracker(copy.deepcopy(source)).eval()


@pytest.fixture(scope="module")
def model(source: Any) -> TrackerModel:
    return packaged(source)


@pytest.fixture(scope="module")
def clip() -> Tensor:
    """Pixels [5, 3, 256, 256]."""
    return torch.cat(noise_clip(SIZE, FRAMES))


def packaged(source: Any) -> TrackerModel:
    return TrackerModel(
        copy.deepcopy(source), name="nano", has_memory=True, mean=IMAGENET.mean, std=IMAGENET.std
    )


def seeing(source: Any, presence: float = 4.0) -> Any:
    with torch.no_grad():
        source.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(presence)
    return source


def disc() -> Tensor:
    """A mask, bool [256, 256]."""
    away = torch.arange(SIZE) - 110.0
    return away[:, None] ** 2 + away[None] ** 2 < 45**2


def random_images(count: int) -> Tensor:
    """One clip, uint8 [1, count, 256, 256, 3]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (1, count, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)


def whole_batch() -> Batch:
    """Three random frames, whose object fills them all."""
    target = torch.full((1, 3, 64, 64), 255, dtype=torch.uint8)
    return Batch(random_images(3), torch.zeros(1, dtype=torch.int64), disc()[None], target)


def tracked(model: TrackerModel, clip: Tensor, prompt: ObjectPrompt) -> list[Tensor]:
    """Logits [1, 64, 64] of each frame, by the package."""
    tracker = Tracker(model, max_objects=1)
    return [tracker.step(pixels[None], [] if i else [prompt]).logits for i, pixels in enumerate(clip)]


@torch.no_grad()
def followed(net: TrainingTracker, clip: Tensor, answer: Callable[[Features], Answer]) -> list[Tensor]:
    """The same by the training forward, the first frame prompted as `answer` does it."""
    memories: list[Memory] = []
    found = []
    for number, pixels in enumerate(clip):
        image = net.encode(pixels[None])
        if number == 0:
            decoded, logits, candidate = answer(image)
        else:
            top = net.read(image.top, number, memories)
            decoded = net.decode(image._replace(top=top), *net.nothing(1))
            candidate = 0
            logits = decoded.logits[:, 0]
        present = decoded.presence > 0
        memory = net.remember(image.top, logits, number == 0, present).bfloat16().float()
        memories.append(Memory(number, number == 0, memory, net.pointer(decoded, candidate, present)))
        found.append(hide(logits, present))
    return found


@torch.no_grad()
def follow(net: TrainingTracker, images: list[Features], corners: Tensor) -> list[Tensor]:
    """Logits [1, 64, 64] of each frame, given as its features; the first is prompted by a box's corners [1, 2, 2]."""
    memories: list[Memory] = []
    found = []
    for number, image in enumerate(images):
        prompted = number == 0
        if prompted:
            decoded = net.decode(net.without_memory(image), *net.prompt(corners, CORNER_LABELS))
        else:
            top = net.read(image.top, number, memories)
            decoded = net.decode(image._replace(top=top), *net.nothing(1))
        present = decoded.presence > 0
        logits = hide(decoded.logits[:, 0], present)
        # as the reference stores it
        memory = net.remember(image.top, logits, prompted, present).bfloat16().float()
        memories.append(Memory(number, prompted, memory, net.pointer(decoded, 0, present)))
        found.append(logits)
    return found


@torch.no_grad()
def encode_by_transformers(source: Any, pixels: Tensor) -> Features:
    """Pixels [1, 3, 256, 256] by transformers' encoder."""
    fine, middle, top = source.vision_encoder(pixels, return_dict=True).fpn_hidden_states
    return Features(source.mask_decoder.conv_s0(fine), source.mask_decoder.conv_s1(middle), top)


@torch.no_grad()
def stream_by_transformers(source: Any, frames: Tensor, corners: Tensor) -> list[Tensor]:
    """Run transformers' streaming inference; the first frame is prompted by a box's corners [1, 2, 2]."""
    session = Sam2VideoInferenceSession(video=None, video_height=SIZE, video_width=SIZE, dtype=torch.float32)
    prompt = {"point_coords": corners[None], "point_labels": CORNER_LABELS[None]}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, prompt)
    session.obj_with_new_inputs.append(1)
    return [
        source(inference_session=session, frame=frames[i : i + 1], frame_idx=i).pred_masks[:, 0]
        for i in range(len(frames))
    ]


def moving_pattern(count: int) -> Tensor:
    """Pixels [count, 3, 256, 256] of a smooth pattern that moves."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.nn.functional.interpolate(
        torch.randn(1, 3, 24, 24, generator=generator), scale_factor=16, mode="bicubic"
    )
    return torch.cat([pattern[..., 2 * i : 2 * i + SIZE, 3 * i : 3 * i + SIZE] for i in range(count)])


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_the_new_tracker_is_small_seeded_and_has_one_position_matrix() -> None:
    first, second, other = (new_tracker(nano_config(), seed) for seed in (0, 0, 1))
    assert 3.6e6 < sum(p.numel() for p in first.parameters()) < 3.8e6
    image = first.shared_image_embedding.positional_embedding
    assert torch.equal(image, first.prompt_encoder.shared_embedding.positional_embedding)
    weights = first.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.state_dict().items())
    assert not torch.equal(image, other.shared_image_embedding.positional_embedding)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_making_a_tracker_leaves_the_caller_its_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    new_tracker(nano_config())
    assert torch.equal(torch.rand(3), expected)


def test_equals_transformers_streaming_inference(source: Any, net: TrainingTracker) -> None:
    frames = moving_pattern(10)
    corners = torch.tensor([BOX]).reshape(1, 2, 2)
    images = [encode_by_transformers(source, frame[None]) for frame in frames]
    with torch.no_grad():
        for ours, theirs in zip(net.encode(frames[:1]), images[0], strict=True):
            assert float((ours - theirs).abs().max()) < ENCODER_TOLERANCE * float(theirs.abs().max())
    reference = stream_by_transformers(source, frames, corners)
    scale = max(float(logits.abs().max()) for logits in reference)
    # on the same features: in bfloat16, as the reference stores memories, rounding makes much of any difference
    assert difference(follow(net, images, corners), reference) < STREAM_TOLERANCE * max(1.0, scale)


def test_a_box_is_followed_as_the_package_follows_it(
    net: TrainingTracker, model: TrackerModel, clip: Tensor
) -> None:
    with torch.no_grad():
        images = [net.encode(pixels[None]) for pixels in clip]
    ours = follow(net, images, torch.tensor([BOX]).reshape(1, 2, 2))
    assert difference(ours, tracked(model, clip, ObjectPrompt(1, box=BOX))) < TOLERANCE


def test_a_point_is_followed_as_the_package_follows_it(
    net: TrainingTracker, model: TrackerModel, clip: Tensor
) -> None:
    def answer(image: Features) -> Answer:
        where = torch.tensor([[POINT]]), torch.ones(1, 1, dtype=torch.int32)
        decoded = net.decode(net.without_memory(image), *net.prompt(*where))
        return decoded, decoded.logits[:, 0], 0

    theirs = tracked(model, clip, ObjectPrompt(1, points=[POINT], labels=[1]))
    assert difference(followed(net, clip, answer), theirs) < TOLERANCE


def test_a_mask_is_followed_as_the_package_follows_it(
    net: TrainingTracker, model: TrackerModel, clip: Tensor
) -> None:
    mask = disc()[None]
    ours = followed(net, clip, lambda image: (net.mask_prompt(image, mask.float()), mask_logits(mask), 1))
    theirs = tracked(model, clip, ObjectPrompt(1, mask=mask[0]))
    assert difference(ours[1:], theirs[1:]) < TOLERANCE


def test_objects_out_of_view_are_remembered_as_the_package_remembers_them(source: Any, clip: Tensor) -> None:
    absent = seeing(copy.deepcopy(source), presence=-4.0)
    tracker = Tracker(packaged(absent), max_objects=1)
    tracker.step(clip[:1], [ObjectPrompt(1, box=BOX)])
    net = TrainingTracker(absent).eval()
    with torch.no_grad():
        image = net.encode(clip[:1])
        where = torch.tensor([BOX]).reshape(1, 2, 2), torch.tensor([[2, 3]], dtype=torch.int32)
        decoded = net.decode(net.without_memory(image), *net.prompt(*where))
        present = decoded.presence > 0
        memory = net.remember(image.top, hide(decoded.logits[:, 0], present), True, present)
    assert not bool(present)
    held = tracker.bank.read(np.zeros(1, np.int64), 1, static=False)
    assert torch.allclose(held.memory[0, 0].float(), memory[0], rtol=0.01, atol=0.01)  # stored in bfloat16
    assert torch.equal(held.pointers[0, 0], net.pointer(decoded, 0, present)[0])


def test_the_cost_of_a_clip_is_that_of_the_masks_that_the_package_finds(source: Any, clip: Tensor) -> None:
    images = random_images(3)
    target = torch.nn.functional.avg_pool2d(disc()[None].float() * 255, 4).to(torch.uint8)
    batch = Batch(images, torch.zeros(1, dtype=torch.int64), disc()[None], target.expand(3, -1, -1)[None])
    net = TrainingTracker(copy.deepcopy(source))
    pixels = normalise(images)
    costs = clip_cost(net, net.encode(pixels), batch, "mask", trust=1.0)
    theirs = tracked(packaged(source), pixels, ObjectPrompt(1, mask=disc()))
    wanted = target[0] > 127
    for item, logits in list(zip(costs, theirs, strict=True))[1:]:
        found = logits[0] > 0
        iou = float((found & wanted).sum() / (found | wanted).sum())
        assert float(item.iou) == pytest.approx(iou, abs=0.002)


def test_images_are_encoded_a_few_at_a_time_as_all_at_once(net: TrainingTracker) -> None:
    pixels = torch.randn(IMAGES + 1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        few = net.encode(pixels)
        one = [net.encode(image[None]) for image in pixels]
    for level, levels in zip(few, zip(*one, strict=True), strict=True):
        torch.testing.assert_close(level, torch.cat(levels), atol=TOLERANCE, rtol=TOLERANCE)


def test_guidance_adds_to_the_cost_of_what_the_memory_hands_on(source: Any) -> None:
    net = TrainingTracker(copy.deepcopy(source))
    batch = whole_batch()
    with torch.no_grad():
        features = net.encode(normalise(batch.images))
        plain, guided = (clip_cost(net, features, batch, "mask", 1.0, guide=weight) for weight in (0.0, 1.0))
    assert [float(item.iou) for item in guided] == [float(item.iou) for item in plain]
    assert float(guided[0].loss) == float(plain[0].loss)
    assert all(float(a.loss) > float(b.loss) + 0.1 for a, b in zip(guided[1:], plain[1:], strict=True))


def test_the_last_frames_cost_teaches_the_memory(source: Any) -> None:
    batch = whole_batch()
    net = TrainingTracker(copy.deepcopy(source)).train()
    clip_cost(net, net.encode(normalise(batch.images)), batch, "box", trust=0.5, again=1)[-1].loss.backward()
    for learned in (
        net.source.memory_encoder.projection.weight,
        net.source.memory_attention.layers[0].cross_attn_image.q_proj.weight,
        net.source.memory_temporal_positional_encoding,
        net.source.object_pointer_proj.proj_in.weight,
    ):
        assert float(learned.grad.abs().max()) > 0


def test_a_cost_does_not_pass_through_the_masks_of_earlier_frames(source: Any) -> None:
    """The fine features of a frame are of use for its own mask alone."""
    batch = whole_batch()
    net = TrainingTracker(copy.deepcopy(source))
    features = net.encode(normalise(batch.images))
    features.fine.retain_grad()
    clip_cost(net, features, batch, "box", trust=0.0)[-1].loss.backward()
    *earlier, last = features.fine.grad.abs().flatten(1).amax(dim=1).tolist()
    assert earlier == [0, 0]
    assert last > 0


def test_pixels_are_normalised_as_the_package_normalises_them(model: TrackerModel) -> None:
    images = random_images(2)
    expected = torch.cat([model.preprocess(image.flip(-1).numpy()) for image in images[0]])
    assert torch.allclose(normalise(images), expected, atol=1e-5)


SIDE = 64


def square(y: int, x: int, side: int, of: int = SIDE) -> Tensor:
    """A mask, float [of, of]."""
    mask = torch.zeros(of, of)
    mask[y : y + side, x : x + side] = 1
    return mask


def decode_logits(logits: Tensor, iou: float = 1.0, presence: float = 20.0) -> Decoded:
    """Make the decoder's output from logits [N, K, 64, 64]."""
    count, candidates = logits.shape[:2]
    ious = torch.full((count, candidates), iou)
    pointers = torch.zeros(count, candidates, 8)
    return Decoded(logits, ious, pointers, torch.full((count,), presence))


def sure(target: Tensor) -> Tensor:
    """Logits [N, 2, 64, 64] that say a target [N, 64, 64] without doubt."""
    return ((target * 2 - 1) * 20)[:, None].expand(-1, 2, -1, -1)


def test_a_perfect_mask_costs_nothing() -> None:
    target = torch.stack([square(10, 10, 20), square(0, 40, 5)])
    found = cost(decode_logits(sure(target)), target)
    assert float(found.loss) < 1e-3
    assert (float(found.iou), float(found.visible), float(found.right), found.objects) == (2, 2, 2, 2)


def test_a_wrong_mask_costs_more_than_one_that_is_half_right() -> None:
    target = square(10, 10, 20)[None]
    half = square(10, 20, 20)[None]
    wrong = square(40, 40, 20)[None]
    costs = [float(cost(decode_logits(sure(mask)), target).loss) for mask in (target, half, wrong)]
    assert costs == sorted(costs)
    assert costs[0] + 0.3 < costs[1] < costs[2] - 0.3


@pytest.mark.parametrize("presence", [-2.0, 3.0])
def test_of_an_object_out_of_view_only_presence_counts(presence: float) -> None:
    target = torch.zeros(1, SIDE, SIDE)
    for mask in (target, square(5, 5, 30)[None]):
        found = cost(decode_logits(sure(mask), iou=0.3, presence=presence), target)
        assert float(found.loss) == pytest.approx(ABSENT * math.log1p(math.exp(presence)))
        assert float(found.right) == (presence < 0)
        assert float(found.visible) == float(found.iou) == 0


def test_a_sliver_is_neither_present_nor_absent() -> None:
    target = square(5, 5, 1)[None] * 0.5
    present, absent = presence_of(target)
    assert not bool(present)
    assert not bool(absent)
    found = cost(decode_logits(sure(square(0, 0, 9)[None]), presence=-9.0), target)
    assert float(found.loss) == 0
    assert float(found.right) == 1


def test_ease_says_how_much_the_outside_weighs() -> None:
    """In doubt everywhere, each cell costs ln 2 times its weight; dice costs the same with any ease."""
    target = square(10, 10, 20)[None]
    area = 400
    doubt = decode_logits(torch.zeros(1, 1, SIDE, SIDE))
    outside = SIDE * SIDE - area
    near = 1 / (area + BACKGROUND)
    far = 1 / (outside + BACKGROUND)
    loss = {ease: float(cost(doubt, target, ease).loss) for ease in (0.0, 0.5, 1.0)}
    assert loss[0.0] - loss[1.0] == pytest.approx(math.log(2) * outside * (near - far), rel=1e-4)
    assert loss[0.5] - loss[1.0] == pytest.approx(
        math.log(2) * outside * (math.sqrt(near * far) - far), rel=1e-4
    )


def test_ease_leaves_the_inside_as_it_is() -> None:
    target = square(10, 10, 20)[None]
    missed = decode_logits(sure(torch.zeros_like(target)))
    near, far = (float(cost(missed, target, ease).loss) for ease in (0.0, 1.0))
    assert near == pytest.approx(far, abs=1e-4)


def test_intersection_over_union_by_hand() -> None:
    target = torch.stack([square(0, 0, 4), square(0, 0, 4), torch.zeros(SIDE, SIDE)])
    predicted = torch.stack([square(0, 2, 4), square(0, 0, 8), torch.zeros(SIDE, SIDE)])
    logits = torch.stack([predicted, target], dim=1) - 0.5
    expected = torch.tensor([[8 / 24, 1.0], [16 / 64, 1.0], [0.0, 0.0]])
    assert torch.allclose(overlap(logits, target), expected)


def test_the_total_is_a_mean_over_object_frames_and_iou_one_over_visible_ones() -> None:
    seen = square(0, 0, 4)[None]
    empty = torch.zeros(1, SIDE, SIDE)
    half = torch.zeros(1, SIDE, SIDE)
    half[0, :4, :2] = 1
    costs = [cost(decode_logits(sure(half)), seen), cost(decode_logits(sure(empty), presence=1.0), empty)]
    loss, figures = total(costs)
    assert float(loss) == pytest.approx(float(costs[0].loss + costs[1].loss) / 2)
    assert figures == {"loss": pytest.approx(float(loss)), "iou": 0.5, "presence": 0.5}


def test_boxes_are_the_outermost_edges_of_a_mask() -> None:
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    masks[0, 10:20, 30:50] = True
    masks[1, 0, 255] = True
    corners, labels = boxes(masks, jitter=0)
    assert corners.tolist() == [[[30, 10], [50, 20]], [[255, 0], [256, 1]]]
    assert labels.tolist() == [[2, 3], [2, 3]]
    assert labels.dtype == torch.int32


def test_jitter_moves_a_box_by_a_share_of_its_sides_within_the_image() -> None:
    torch.manual_seed(0)
    masks = torch.zeros(200, SIZE, SIZE, dtype=torch.bool)
    masks[:, 0:40, 100:200] = True
    corners, _ = boxes(masks, jitter=0.05)
    away = corners - torch.tensor([[100.0, 0.0], [200.0, 40.0]])
    assert 3 < float(away[..., 0].std()) < 7
    assert 1 < float(away[:, 1, 1].std()) < 3
    assert float(corners.min()) >= 0
    assert float(corners.max()) <= SIZE


def test_points_lie_inside_their_masks() -> None:
    torch.manual_seed(0)
    masks = torch.zeros(40, SIZE, SIZE, dtype=torch.bool)
    for index, mask in enumerate(masks):
        mask[2 * index : 2 * index + 1 + index, 100 : 103 + index] = True
    where, labels = points(masks)
    x, y = where[:, 0].long().unbind(dim=1)
    assert bool(masks[torch.arange(40), y, x].all())
    assert labels.tolist() == [[1]] * 40


@pytest.mark.parametrize(
    ("spill", "label", "y", "x"), [(-5, 1, 25.5, 25.5), (square(40, 4, 9)[None] - 0.5, 0, 44.5, 8.5)]
)
def test_a_correction_clicks_into_what_was_missed_or_is_too_much(
    spill: Any, label: int, y: float, x: float
) -> None:
    target = square(20, 20, 11)[None]
    found = target + spill if label == 0 else torch.full((1, SIDE, SIDE), float(spill))
    where, labels = corrections(found, target)
    assert labels.tolist() == [[label]]
    assert (where[0, 0] / CELL).tolist() == pytest.approx([x, y], abs=1)  # the middle of the square


@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 64, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_agrees_with_the_one_in_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(24, 40), torch.randn(24, 40), torch.randn(48, 16)]
    theirs = [matrix.clone() for matrix in ours]
    mine = Muon(ours, lr=0.01)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for matrix, other in zip(ours, theirs, strict=True):
            matrix.grad = torch.randn_like(matrix)
            other.grad = matrix.grad.clone()
        mine.step()
        reference.step()
    for matrix, other in zip(ours, theirs, strict=True):
        assert (matrix - other).abs().max() < 2e-3, "theirs is rounded to bfloat16"


def test_a_matrix_without_gradient_stays() -> None:
    still = torch.ones(16, 16)
    moving = torch.randn(16, 16)
    moving.grad = torch.randn(16, 16)
    before = moving.clone()
    Muon([still, moving], lr=0.1, weight_decay=0.0).step()
    assert bool((still == 1).all())
    change = (moving - before).square().mean().sqrt()
    assert 0.5 < change / (0.1 * LIKE_ADAM) < 1.5

"""Everything on a frame, against transformers' mask generation pipeline with the same weights."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pycocotools import mask as coco
from transformers import pipeline
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.errors import RequestError
from sam3_node.models.checkpoints import load_tracker
from sam3_node.models.families import edgetam, sam1, sam2, sam3
from sam3_node.perception.output_masks import rasterize
from sam3_node.resumable import resume, run_to_end
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.everything import EverythingOptions, FilterStatistics, segment_everything
from sam3_node.wire import decode_image
from tests.support.refuses import refuses
from tests.support.tabletop import truth
from tests.support.tiny import tiny_model
from tests.support.tiny_sam1 import SIZE, random_sam1

# random masks overlap
OPTIONS = EverythingOptions(grid=6, min_iou=0.25, min_stability=0.0, max_overlap=1.0, most=256)
MATCH = 0.95


class Processor(SamImageProcessorPil):
    """transformers' processor with a suppression of its own, because that of transformers needs torchvision."""

    def post_process_for_mask_generation(
        self, all_masks: list, all_scores: torch.Tensor, all_boxes: torch.Tensor, crops_nms_thresh: float
    ) -> tuple:
        corners = all_boxes.double().numpy()
        boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
        ious = coco.iou(boxes, boxes, [0] * len(boxes))
        kept: list[int] = []
        for index in all_scores.argsort(descending=True).tolist():
            if not kept or ious[index, kept].max() <= crops_nms_thresh:
                kept.append(index)
        masks = [decode(all_masks[index]) for index in kept]
        return masks, all_scores[kept], all_masks, all_boxes[kept]


def decode(rle: dict) -> np.ndarray:
    """Decode the uncompressed run lengths of transformers."""
    height, width = rle["size"]
    return (
        coco.decode(coco.frPyObjects({"size": [height, width], "counts": rle["counts"]}, height, width)) > 0
    )


def encode(masks: list[np.ndarray]) -> list[dict]:
    return [coco.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in masks]


def test_masks_are_those_of_transformers_pipeline(tmp_path: Path) -> None:
    """There is no limit of stability, which transformers measures after upsampling, and ours before it."""
    from PIL import Image

    source = random_sam1()
    source.save_pretrained(tmp_path)
    model = load_tracker(tmp_path)
    for buffer in (model.mean, model.std):
        buffer.fill_(0.5)
    image = np.random.default_rng(3).integers(0, 255, (10, 10, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    sides = {"height": SIZE, "width": SIZE}
    processor = Processor(
        size={"longest_edge": SIZE}, pad_size=sides, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    generator = pipeline("mask-generation", model=source, image_processor=processor, device="cpu")
    truth = generator(
        Image.fromarray(image),
        points_per_crop=6,
        points_per_batch=16,
        pred_iou_thresh=OPTIONS.min_iou,
        stability_score_thresh=0.0,
        crops_nms_thresh=OPTIONS.max_overlap,
    )
    features = model.encode(model.preprocess(image[..., ::-1].copy()))
    found = run_to_end(segment_everything(model, features, OPTIONS))
    assert 10 <= len(found.iou) < 100, "the limit of the predicted IoU must matter"
    assert np.allclose(found.iou, truth["scores"], atol=1e-3)
    for low, theirs in zip(found.logits, truth["masks"], strict=True):
        ours = rasterize(low.numpy(), (SIZE, SIZE)).full()
        assert coco.iou(encode([ours]), encode([np.asarray(theirs)]), [0])[0, 0] > MATCH


def test_masks_that_depend_on_the_threshold_are_left_out() -> None:
    model = tiny_model(presence=60.0)
    features = model.encode(torch.randn(1, 3, model.image_size, model.image_size))
    every = EverythingOptions(grid=4, min_iou=0.0, min_stability=0.0, max_overlap=1.0, most=256)
    found = run_to_end(segment_everything(model, features, every))
    inner, outer = ((found.logits > level).flatten(1).sum(dim=1) for level in (1.0, -1.0))
    limit = float((inner / outer).median())
    sure = run_to_end(segment_everything(model, features, replace(every, min_stability=limit)))
    assert 0 < len(sure.iou) < len(found.iou)
    assert torch.equal(sure.iou, found.iou[inner > limit * outer])


def test_masks_are_sure_different_and_few() -> None:
    model = tiny_model(presence=60.0)
    features = model.encode(torch.randn(1, 3, model.image_size, model.image_size))
    options = EverythingOptions(grid=5, min_iou=0.0, min_stability=0.0, most=4)
    found = run_to_end(segment_everything(model, features, options))
    assert 1 <= len(found.logits) <= 4
    assert (found.iou.diff() <= 0).all()
    assert (found.logits > 0).flatten(1).any(dim=1).all()
    none = run_to_end(segment_everything(model, features, EverythingOptions(grid=2, min_iou=1.0)))
    assert none.logits.shape == (0, *model.mask_size)


@pytest.mark.parametrize(
    ("name", "family", "limits"),
    [
        ("nano", sam2, (0.5, 0.5)),
        ("sam2-hiera-tiny", sam2, (0.8, 0.95)),
        ("edgetam", edgetam, (0.8, 0.95)),
        ("facebook/sam3", sam3, (0.88, 0.95)),
        ("sam1", sam1, (0.88, 0.95)),
    ],
)
def test_each_kind_of_model_has_its_limits(
    name: str, family: ModuleType, limits: tuple[float, float]
) -> None:
    model = tiny_model(presence=60.0)
    model.name = name
    model.mask_limits = family.FAMILY.mask_limits
    own = EverythingOptions().complete(model)
    assert (own.min_iou, own.min_stability) == limits
    given = EverythingOptions(min_iou=0.0, min_stability=0.2).complete(model)
    assert (given.min_iou, given.min_stability) == (0.0, 0.2)


def test_the_limit_that_leaves_nothing_is_named() -> None:
    model = tiny_model(presence=60.0)
    features = model.encode(torch.randn(1, 3, model.image_size, model.image_size))
    for min_iou, min_stability, said in (
        (1.0, 0.0, "min_iou 1 (the best 0."),
        (0.0, 1.0, "min_stability 1 (the best"),
    ):
        options = EverythingOptions(3, min_iou, min_stability)
        statistics = FilterStatistics()
        assert len(run_to_end(segment_everything(model, features, options, statistics)).iou) == 0
        assert statistics.candidates >= 9
        assert statistics.stable == 0
        assert said in statistics.explain(options.complete(model))


def test_nano_finds_the_objects_of_the_bundled_scene() -> None:
    model = load_tracker("nano")
    clip = LabelledClip.load(TABLETOP)
    image = decode_image(clip.frames[0])
    found = run_to_end(segment_everything(model, model.encode(model.preprocess(image)), EverythingOptions()))
    masks = encode([rasterize(low.numpy(), image.shape[:2]).full() for low in found.logits])
    objects = encode([instance.mask.full() for instance in truth()[clip.frames[0].seq].instances])
    assert len(objects) == 5
    assert (coco.iou(objects, masks, [0] * len(masks)).max(axis=1) > 0.5).all()
    assert len(masks) <= 30


def test_what_happens_between_the_turns_changes_nothing() -> None:
    model = tiny_model(presence=60.0)
    pixels = torch.randn(2, 1, 3, model.image_size, model.image_size)
    features = model.encode(pixels[0])
    options = EverythingOptions(grid=7, min_iou=0.0, min_stability=0.0, max_overlap=1.0, most=256)
    expected = run_to_end(segment_everything(model, features, options))
    tracker = Tracker(model, max_objects=2)
    turns = 0
    work = segment_everything(model, features, options)
    while (found := resume(work)) is None:
        tracker.step(pixels[1], [ObjectPrompt(1, points=[[40, 50]])] if turns == 0 else [])
        turns += 1
    assert turns == math.ceil(7 * 7 / model.batch_size) > 1
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.iou, expected.iou)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"grid": 33}, ("grid", "1", "32")), ({"most": 0}, "most"), ({"min_iou": 2.0}, "min_iou")],
)
def test_options_out_of_range_are_refused(options: dict, said: str | tuple[str, ...]) -> None:
    with refuses(RequestError, field=said):
        EverythingOptions(**options)

"""Compare SAM 3.1's concept detector with a clone of muggled_sam on the same random weights.

    python -m tools.sam31.concept_parity --oracle CLONE [--record FILE]

muggled_sam moves boxes by the decoder's tokens as they are. Meta's code, as ported to mlx-vlm and transformers, takes
those after the last norm, so the clone is given that norm before its head of boxes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sam3_node.detection.sam3_concept import ConceptNetwork
from sam3_node.detection.sam3_concept_weights import build_sam3_model
from tests.support.sam31_detector import HIDDEN, whole_tensors

from ..command import errors_in_one_line, new_parser

TOKENS = 32
"""Tokens of text that muggled_sam expects."""
PHRASE = [54, 3, 40, 52, 55]
"""A phrase of tokens of the small model."""
BOXES = [[0.1, 0.2, 0.5, 0.7], [0.4, 0.3, 0.9, 0.6]]
LABELS = [1, 0]
LIMIT = 1e-4
"""Largest relative error, in float32."""


class Found(NamedTuple):
    """What a detector computes on the way from a picture and a phrase to boxes."""

    features: Tensor
    text: Tensor
    exemplar: Tensor
    text_boxes: Tensor
    text_scores: Tensor
    exemplar_boxes: Tensor
    exemplar_scores: Tensor
    presence: Tensor


def make_pixels(size: int) -> Tensor:
    """Make a seeded picture [1, 3, S, S]."""
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(5)).clamp(-1, 1)


@torch.inference_mode()
def run_ours(tensors: dict[str, Tensor]) -> Found:
    """Run our detector."""
    model: Any = build_sam3_model(tensors, "random")
    network = ConceptNetwork(model)
    features, position = network.encode(network.trunk(make_pixels(112)))
    ids = torch.tensor([PHRASE])
    mask = torch.ones_like(ids)
    text = network.encode_text(ids, mask)
    exemplar = network.encode_boxes(features, position, torch.tensor(BOXES), torch.tensor(LABELS))[None]
    seen: list[Tensor] = []
    handle = network.decoder.register_forward_hook(
        lambda _module, _inputs, output: seen.append(output.presence_logits[-1].sigmoid())
    )
    outputs = []
    for prompt in (text, torch.cat([text, exemplar], dim=1)):
        outputs += network(features, position, prompt, torch.ones(prompt.shape[:2], dtype=torch.bool))
    handle.remove()
    return Found._make([features, text, exemplar, *outputs, torch.cat(seen)])


@torch.inference_mode()
def run_oracle(folder: Path, tensors: dict[str, Tensor]) -> Found:
    """Run muggled_sam's detector."""
    sys.path.insert(0, str(folder))
    package = "muggled_sam.v3p1_sam"
    make = importlib.import_module(f"{package}.make_sam_v3p1")
    sizes = importlib.import_module(f"{package}.state_dict_conversion.config_from_original_state_dict")
    keys = importlib.import_module(f"{package}.state_dict_conversion.convert_original_state_dict_keys")
    config = sizes.get_model_config_from_state_dict(tensors)
    core = make.make_sam_v3p1(**config).eval()
    converted, _ = keys.convert_state_dict_keys(config, tensors)
    # every tensor of the parts that detect, but no points
    for part in (
        "image_encoder",
        "text_encoder",
        "sampling_encoder",
        "image_exemplar_fusion",
        "exemplar_detector",
    ):
        lacking, unknown = getattr(core, part).load_state_dict(converted[part], strict=False)
        wrong = [name for name in lacking if "point_encoder" not in name] + unknown
        print(f"{part}: {len(converted[part])} tensors, lacking or unknown: {wrong}")
    # its level has 256 channels in any model, so the two maps are made of the size of the weights
    level = nn.Sequential(nn.Conv2d(HIDDEN, HIDDEN, 1), nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1))
    prefix = "multires_proj_detect.proj_x1."
    state = {
        name.removeprefix(prefix): value
        for name, value in converted["image_projection"].items()
        if name.startswith(prefix)
    }
    level.load_state_dict(state)
    detector = core.exemplar_detector
    detector.mlp_detection_to_box = nn.Sequential(detector.out_norm_detections, detector.mlp_detection_to_box)

    # the phrase's tokens come from us
    core.text_encoder.tokenizer.text_to_vocab_index = lambda _text: torch.tensor([PHRASE])
    trunk = core.image_encoder(make_pixels(112))
    features = level(trunk)
    text = core.text_encoder("")
    boxes = torch.tensor(BOXES).view(1, -1, 2, 2)
    exemplar = core.sampling_encoder(features, boxes_bn22=boxes[:, :1], negative_boxes_bn22=boxes[:, 1:])
    outputs = []
    presence = []
    for prompt in (text, torch.cat([text, exemplar], dim=1)):
        fused = core.image_exemplar_fusion(features, prompt, None)
        _, found, scores, present = core.exemplar_detector(fused, prompt, None)
        outputs += [found.flatten(2).clamp(0, 1), scores]
        presence.append(present.view(1, 1))
    return Found._make([features, text, exemplar, *outputs, torch.cat(presence)])


def compute_errors(ours: Found, theirs: Found) -> dict[str, float]:
    """Return the relative error of each value, by the largest."""
    pairs = zip(Found._fields, ours, theirs, strict=True)
    return {name: float((mine - other).abs().max() / other.abs().max()) for name, mine, other in pairs}


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__, prog="python -m tools.sam31.concept_parity")
    parser.add_argument("--oracle", type=Path, required=True, help="a clone of muggled_sam")
    parser.add_argument("--record", type=Path, help="also write some of the other's values, for a test")
    options: argparse.Namespace = parser.parse_args()
    with errors_in_one_line():
        tensors = whole_tensors(tokens=TOKENS)
        theirs = run_oracle(options.oracle, tensors)
        errors = compute_errors(run_ours(tensors), theirs)
        for name, error in errors.items():
            print(f"{error:9.1e}  {name}")
        if options.record is not None:
            values = {name: value.tolist() for name, value in theirs._asdict().items() if name != "features"}
            options.record.write_text(json.dumps(values) + "\n")
    if max(errors.values()) >= LIMIT:
        raise SystemExit(f"error: a value differs by more than {LIMIT}")


if __name__ == "__main__":
    main()

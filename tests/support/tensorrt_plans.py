"""Reads what TensorRT-RTX makes of the stages of SAM 3 and 3.1: fused attentions, how they add, FP8 products, memory.

No GPU is needed: the builder describes each layer, and a plan holds the source of its fused kernels. Weights are random
and in bfloat16. The encoder has the full width and 2 of its 32 layers: one with windows, one global. Memory is what a
stage needs for intermediate values at the largest number of objects, or of groups of 16, of a call.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Sam3TrackerVideoModel
from transformers.initialization import no_init_weights

from sam3_node.engines.build import limit_objects
from sam3_node.engines.export import export
from sam3_node.engines.quantize import Scales, export_quantised, find_layers, weights_digest
from sam3_node.engines.specs import tracker_stages
from sam3_node.engines.tensorrt.builder import build
from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import set_image_size
from sam3_node.models.sam31.checkpoint import build_source
from sam3_node.models.sam31.loading import build_model, set_size
from sam3_node.models.sam31.random_weights import full_sizes, random_tensors
from tools.bench.latency.step import CONFIGS

ATTENTION = "_gemm_mha"
FP8 = "FP8"
AMAX = 8.0  # of made-up scales: the structure of a plan does not depend on them
MAX_OBJECTS = 16

_LAYER = re.compile(r"^Name: (\S+), LayerType: (\w+), Inputs: (.*), Outputs: (.*), TacticName", re.MULTILINE)
_DTYPE = re.compile(r"Datatype: (\w+)")
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")
_TRAITS = re.compile(rb"fmha::(\w+_traits),")


class Layer(NamedTuple):
    """A layer of a plan, and the dtypes of its inputs, constants included, and outputs as the library names them."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PlanReport(NamedTuple):
    """Contents of a plan."""

    layers: tuple[Layer, ...]
    traits: Counter[str]
    """Arithmetic of the fused attentions, by the names in their source; two for each: of Q K and of P V"""
    activation_bytes: int
    plan_bytes: int

    @property
    def attentions(self) -> int:
        """Number of attentions that are one kernel each."""
        return sum(layer.name.startswith(ATTENTION) for layer in self.layers)

    @property
    def fp8_products(self) -> list[Layer]:
        """Matrix products whose two factors are in FP8."""
        return [layer for layer in self.layers if layer.kind == "gemm" and layer.inputs[:2] == (FP8, FP8)]


def read_report(plan: bytes, notes: Sequence[str]) -> PlanReport:
    """Read what the builder said of a plan, `notes` of `build`, and what the plan itself holds."""
    text = "\n".join(notes)
    layers = tuple(
        Layer(name, kind, *(tuple(_DTYPE.findall(side)) for side in sides))
        for name, kind, *sides in _LAYER.findall(text)
    )
    traits = Counter(name.decode() for name in _TRAITS.findall(plan))
    return PlanReport(layers, traits, int(_ACTIVATION.findall(text)[-1]), len(plan))


def make_model(image_size: int, read_layers: int = 4) -> TrackerModel:
    """Make SAM 3's tracker with two of the encoder's layers; weights are random and in bfloat16."""
    config = CONFIGS["full"]()
    backbone = config.vision_config.backbone_config
    backbone.num_hidden_layers = 2
    backbone.global_attn_indexes = [1]
    config.memory_attention_num_layers = read_layers
    with no_init_weights():
        source: Any = Sam3TrackerVideoModel(set_image_size(config, image_size, "full")).eval().bfloat16()
    torch.manual_seed(0)
    for parameter in source.requires_grad_(False).parameters():
        parameter.normal_(0, 0.02)
    return TrackerModel(source, name="full, 2 layers", mean=[0.5] * 3, std=[0.5] * 3)


def make_group_model(image_size: int, read_layers: int = 4) -> TrackerModel:
    """Make SAM 3.1's tracker with two of the encoder's layers; weights are random and in bfloat16."""
    name = "full SAM 3.1, 2 layers"
    sizes = full_sizes()._replace(layers=2, global_layers=(1,), read_layers=read_layers)
    sizes = set_size(sizes, image_size, name)
    source = build_source(random_tensors(sizes), sizes, name)
    return build_model(source, name, torch.device("cpu"), torch.bfloat16)


def report_plans(
    model: TrackerModel, variants: Sequence[str], gpus: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, PlanReport]]:
    """Export each variant once, build it for each GPU generation, and yield variant, generation and report.

    A variant is a stage, such as "read", or "encode in FP8".
    """
    for variant in variants:
        stage = tracker_stages(model)[variant.split()[0]]
        path = folder / f"{stage.name}.onnx"
        if variant.endswith(FP8):
            amax = dict.fromkeys(find_layers(model.encode_stage), AMAX)
            scales = Scales(model=model.name, digest=weights_digest(model), frames=1, amax=amax)
            export_quantised(model, scales, path)
        else:
            export(stage, path)
        for gpu in gpus:
            notes: list[str] = []
            most = limit_objects(model, stage, MAX_OBJECTS)
            yield variant, gpu, read_report(build(path, stage, gpu, most, notes=notes), notes)

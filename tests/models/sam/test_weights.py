"""Weights that are read without transformers, against transformers."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import (
    EdgeTamVideoConfig,
    PreTrainedConfig,
    Sam2VideoConfig,
    Sam3TrackerVideoConfig,
    SamConfig,
)

from sam3_node.errors import ModelError
from sam3_node.models import load_tracker
from sam3_node.models.checkpoints import NANO
from sam3_node.models.sam.configuration import EdgeTamConfig, Sam1Config, Sam2Config, Sam3Config
from sam3_node.models.sam.weights import TrackerWeights
from sam3_node.models.tracker_reader import read_config
from tests.support.refuses import refuses
from tests.support.tiny import random_source
from tools.bench.edgetam_weights import DEPTHS, WIDTHS, RepVitConfig

EDGETAM_VISION = {"model_type": "edgetam_vision_model", "backbone_config": RepVitConfig(WIDTHS, DEPTHS)}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sam2Config, Sam2VideoConfig()),
        (Sam3Config, Sam3TrackerVideoConfig()),
        (EdgeTamConfig, EdgeTamVideoConfig(vision_config=EDGETAM_VISION)),
        (Sam1Config, SamConfig()),
    ],
)
def test_defaults_are_those_of_transformers(tmp_path: Path, ours: type, theirs: PreTrainedConfig) -> None:
    """A file may leave out what equals them."""
    (tmp_path / "config.json").write_text("{}")
    found = msgspec.to_builtins(read_config(tmp_path / "config.json", ours))
    assert_equal(found, theirs.to_dict(), "")


def assert_equal(found: dict, expected: dict, path: str) -> None:
    for name, value in found.items():
        where = f"{path}.{name}"
        if name in ("model_type", "tracker_config", "architecture"):
            continue
        if isinstance(value, dict):
            assert_equal(value, expected[name], where)
        else:
            assert flatten(value) == flatten(expected[name]), where


def flatten(value: object) -> object:
    """Sizes may be given for both axes."""
    if isinstance(value, list | tuple):
        parts = [flatten(part) for part in value]
        return (
            parts[0] if len(parts) == 2 and parts[0] == parts[1] and "int" in str(type(parts[0])) else parts
        )
    return value


@pytest.mark.parametrize(
    ("family", "config"), [("sam2", Sam2Config), ("sam3", Sam3Config), ("edgetam", EdgeTamConfig)]
)
def test_tensors_have_the_names_shapes_and_order_of_transformers(
    tmp_path: Path, family: str, config: type
) -> None:
    source = random_source(family)
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        ours = TrackerWeights(read_config(tmp_path / "config.json", config))
    expected = [(name, value.shape) for name, value in source.state_dict().items()]
    assert [(name, value.shape) for name, value in ours.state_dict().items()] == expected


def test_a_tracker_loads_without_transformers_and_the_compiler() -> None:
    """They take most of the time until a node is ready."""
    code = (
        "import sys, sam3_node.node.node, sam3_node.models as m; m.load_tracker('nano'); "
        "print([n for n in ('transformers', 'torch._dynamo', 'scipy', 'sympy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_maskmem", 10**8),
        ("memory_attention_num_layers", 10**8),
        ("memory_attention_num_layers", 0),
        ("mask_downsampler_stride", 1),
        ("vision_config", {"backbone_config": {"blocks_per_stage": [10**8, 1, 1, 1]}}),
        ("vision_config", {"backbone_config": {"blocks_per_stage": [1]}}),
        ("vision_config", {"backbone_config": {"embed_dim_per_stage": [0, 1, 1, 1]}}),
        ("vision_config", []),
        ("image_size", "large"),
        ("rope_parameters", {"rope_theta": 5.0}),
    ],
)
def test_a_configuration_out_of_bounds_is_refused(tmp_path: Path, field: str, value: object) -> None:
    config = json.loads((NANO / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((NANO / "model.safetensors").read_bytes())
    with refuses(ModelError, field=str(tmp_path)):
        load_tracker(tmp_path)

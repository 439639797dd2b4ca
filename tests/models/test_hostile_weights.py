"""Weights whose author wants memory or time: numbers of layers, empty tensors, archives and pickles that grow."""

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sam3_node.detection.clip_text import ClipText
from sam3_node.detection.sam3_concept_weights import build_sam3_model
from sam3_node.errors import ModelError, VocabularyError
from sam3_node.models import load_tracker
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.models.torch_files import check_torch_file
from sam3_node.models.weight_files import check_config, read_normalisation
from sam3_node.models.yolo.convert import convert_checkpoint, read_checkpoint
from sam3_node.models.yolo.network import load_yolo_world
from tests.support.hostility import limited_memory
from tests.support.tiny import random_source
from tests.support.tiny_clip import write_tiny_clip

TRUNK = "detector.backbone.vision_backbone.trunk"
MODEL = "tracker.model"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(small_sizes())


def changed(tensors: Tensors, name: str, value: Tensor) -> Tensors:
    assert name.rpartition(".")[0]
    return tensors | {name: value}


SAM31 = {
    "number": (f"{TRUNK}.blocks.300000000.x", torch.zeros(1), "at most 256 layers"),
    "endless number": (f"{MODEL}.transformer.encoder.layers.{'9' * 5000}.x", torch.zeros(1), "at most 256"),
    "zeros before": (f"{MODEL}.maskmem_backbone.fuser.layers.0099.x", torch.zeros(1), "at most 256 layers"),
    "no slots": (f"{MODEL}.sam_mask_decoder.iou_token.weight", torch.zeros(0, 32), "empty|values in"),
    "no axes": (f"{TRUNK}.pos_embed", torch.tensor(1.0), "without IndexError"),
    "wide heads": (f"{TRUNK}.blocks.0.attn.freqs_cis", torch.zeros(16, 1 << 16), "found others"),
    "narrow": (
        f"{MODEL}.sam_mask_decoder.transformer.layers.0.cross_attn_token_to_image.q_proj.weight",
        torch.zeros(4096, 4),
        "found others",
    ),
    "many tokens": (f"{TRUNK}.blocks.0.attn.freqs_cis", torch.zeros(600 * 600, 1), "at most 512 tokens"),
}


@pytest.mark.parametrize("kind", SAM31)
def test_the_sizes_of_sam31_are_bounded(tensors: Tensors, tmp_path: Path, kind: str) -> None:
    name, value, message = SAM31[kind]
    path = tmp_path / "weights.safetensors"
    save_file(changed(tensors, name, value), path)
    with limited_memory(32), pytest.raises(ModelError, match=message):
        load_tracker(path)


def test_layers_of_a_detector_are_bounded(tensors: Tensors) -> None:
    text = "detector.backbone.language_backbone.encoder"
    hostile = tensors | {
        "detector.transformer.decoder.query_embed.weight": torch.zeros(4, 32),
        f"{text}.token_embedding.weight": torch.zeros(8, 8),
        f"{text}.transformer.resblocks.0.mlp.c_fc.weight": torch.zeros(8, 8),
        f"{text}.transformer.resblocks.100000000.x": torch.zeros(1),
    }
    with limited_memory(8), pytest.raises(ModelError, match="at most 256 layers"):
        build_sam3_model(hostile, "hostile")


CONFIGS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("mask_decoder_config", lambda part: part.update(num_hidden_layers=10**8)),
    ("memory_attention", lambda part: part.update(memory_attention_num_layers=1e12)),
    ("vision_config", lambda part: part["backbone_config"].update(blocks_per_stage=[1, 2, 10**8, 2])),
    ("vision_config", lambda part: part["backbone_config"].update(num_labels=10**9)),
    ("prompt_encoder_config", lambda part: part.update(image_size=10**10)),
]


@pytest.mark.parametrize(("part", "harm"), CONFIGS)
def test_the_numbers_of_a_configuration_are_bounded(part: str, harm: Callable[[Any], object]) -> None:
    config = random_source("sam2").config.to_dict()
    check_config(config, "weights")
    harm(config.get(part, config))
    with pytest.raises(ModelError, match=r"config\.json: expected at most"):
        check_config(config, "weights")


def test_a_configuration_of_a_larger_model_takes_no_memory(tmp_path: Path) -> None:
    random_source("sam2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mask_decoder_config"]["mlp_dim"] = 1 << 16
    config["memory_attention_feed_forward_hidden_size"] = 1 << 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    with limited_memory(64), pytest.raises(ModelError, match="elements, as config"):
        load_tracker(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100, '{"a": NaN}', "[1]", "9" * 5000]
)
def test_a_configuration_that_is_no_map_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    for load in (load_tracker, load_yolo_world):
        with pytest.raises(ModelError, match=r"config\.json"):
            load(tmp_path)


def test_sizes_that_do_not_fit_together_are_told(tmp_path: Path) -> None:
    random_source("sam2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mask_decoder_config"]["num_attention_heads"] = 256
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="sizes that fit together"):
        load_tracker(tmp_path)


def test_the_depths_of_a_yolo_world_are_bounded(tmp_path: Path) -> None:
    config = {
        "channels": [16, 24, 48, 96, 160],
        "depths": [1, 10**8, 1, 1],
        "neck_depth": 1,
        "box_channels": 32,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"embedding_channels": 48, "attention_channels": 8})
    )
    with pytest.raises(ModelError, match="less than or equal to 256"):
        load_yolo_world(tmp_path)


def write_archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write a file in torch's format with this pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("weights/data.pkl", data)
        archive.writestr("weights/version", b"3\n", zipfile.ZIP_STORED)


def call(name: str, argument: bytes) -> bytes:
    """Return a pickle that calls a function with one argument."""
    module, _, function = name.rpartition(".")
    return b"\x80\x02c" + f"{module}\n{function}\n".encode() + argument + b"\x85R."


HUGE = b"\x8a\x05" + (1 << 36).to_bytes(5, "little")
TORCH_FILES: dict[str, Callable[[Path], None]] = {
    "compressed": lambda path: write_archive(
        path, b"\x80\x02" + b"N0" * (1 << 21) + b"N.", zipfile.ZIP_DEFLATED
    ),
    "bzip2": lambda path: write_archive(path, b"\x80\x02" + b"N0" * (1 << 21) + b"N.", zipfile.ZIP_BZIP2),
    "large pickle": lambda path: write_archive(path, b"\x80\x02" + b"N0" * (3 << 20) + b"N."),
    "bytearray": lambda path: write_archive(path, call("builtins.bytearray", HUGE)),
    "tensor": lambda path: write_archive(path, call("torch.Tensor", HUGE)),
    "storage": lambda path: write_archive(path, call("torch.storage.UntypedStorage", HUGE)),
    "empty": lambda path: path.write_bytes(b""),
    "old format": lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"model": 1})),
}
READERS: list[Callable[[Path], object]] = [
    load_tracker,
    read_checkpoint,
    lambda path: convert_checkpoint(path, path.parent / "out"),
    check_torch_file,
]


@pytest.mark.parametrize("kind", TORCH_FILES)
def test_a_file_in_torchs_format_is_checked_before_it_grows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights.pt"
    TORCH_FILES[kind](path)
    for read in READERS:
        with limited_memory(8), pytest.raises(ModelError):
            read(path)


def test_torchs_own_files_of_a_text_encoder_are_checked(tmp_path: Path) -> None:
    write_tiny_clip(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    TORCH_FILES["compressed"](tmp_path / "pytorch_model.bin")
    with limited_memory(32), pytest.raises(VocabularyError, match="compressed member"):
        ClipText(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "/etc/passwd"}}')
    with pytest.raises(VocabularyError, match=r"several files pytorch_model\.bin"):
        ClipText(tmp_path)


def test_tensors_of_repeated_values_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(1).expand(1 << 30, 1 << 10)}, path)
    with limited_memory(8), pytest.raises(ModelError, match="at most 4 times the file's"):
        load_tracker(path)


@pytest.mark.parametrize(
    "given",
    [
        {"image_mean": [0.5] * 3, "image_std": [0.5, 0, 0.5]},
        {"image_mean": "abc", "image_std": [0.5] * 3},
        {"image_mean": [0.5] * 3, "image_std": ["1", "1", "1"]},
        {"image_mean": [0.5, 0.5], "image_std": [0.5] * 3},
        {"image_mean": [0.5] * 3},
        {"image_mean": [127.5] * 3, "image_std": [127.5] * 3},
        {"image_mean": [True] * 3, "image_std": [0.5] * 3},
        {"image_mean": [0.5] * 3, "image_std": [1e-300] * 3},
    ],
)
def test_a_normalisation_that_makes_no_pixels_is_refused(tmp_path: Path, given: dict[str, object]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    with pytest.raises(ModelError, match=r"preprocessor_config\.json: expected three numbers each"):
        read_normalisation(str(tmp_path), ([0.0] * 3, [1.0] * 3))


def test_a_normalisation_of_nan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [NaN, 0, 0], "image_std": [1, 1, 1]}')
    with pytest.raises(ModelError, match="NaN"):
        read_normalisation(str(tmp_path), ([0.0] * 3, [1.0] * 3))

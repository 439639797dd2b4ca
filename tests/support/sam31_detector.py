"""Random weights of SAM 3.1's whole checkpoint under the names of Meta's file: tracker and detector."""

import math

import msgspec
import torch
from torch import Tensor
from transformers import Sam3Config, Sam3Model

from sam3_node.detection.sam3_concept_weights import HEADS, detector_name
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.models.sam31.source import NECKS, TRUNK, tracker_config
from tests.support.tiny_clip import TOKENS

HIDDEN = 64
TEXT_WIDTH = 64
WORDS = 56
QUERIES = 12
VECTOR_SIGMA = 0.5
BIAS_SIGMA = 0.1
QUERY_SIGMA = 4.0
"""Standard deviation of the queries, so that they find different boxes."""
SCORE_GAIN = 4.0
"""Factor of the maps of which scores are products, for logits of a trained model's size. Most are negative."""


def whole_tensors(seed: int = 0, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Make the tensors of tracker and detector, float32, of a small model with `tokens` tokens of text."""
    sizes = small_sizes(hidden=HIDDEN)
    tensors = random_tensors(sizes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, shape in sorted(_shapes(tokens).items()):
        tensors[name] = _random_tensor(name, shape, generator)
    return tensors


def _shapes(tokens: int) -> dict[str, tuple[int, ...]]:
    sizes = small_sizes(hidden=HIDDEN)
    vision = msgspec.json.decode(msgspec.json.encode(tracker_config(sizes).vision_config))
    vision["scale_factors"] = [1.0, 0.5]
    part = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 8 * HIDDEN}
    config = Sam3Config(
        vision_config=vision,
        text_config={
            "vocab_size": WORDS,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 4 * TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "max_position_embeddings": tokens,
        },
        geometry_encoder_config=part | {"num_layers": 1},
        detr_encoder_config=part | {"num_layers": 2},
        detr_decoder_config=part | {"num_layers": 2, "num_queries": QUERIES},
        mask_decoder_config={"hidden_size": HIDDEN, "num_attention_heads": HEADS},
    )
    with torch.device("meta"):
        state = Sam3Model(config).state_dict()
    shapes = {}
    for target, value in state.items():
        name = detector_name(target, sizes)
        if name is None or name.startswith(TRUNK):
            continue
        shape = tuple(value.shape)
        if ".in_proj_" in name:
            shape = (3 * shape[0], *shape[1:])
        shapes[name] = shape
    assert any(name.startswith(f"{NECKS}.convs.2.") for name in shapes)
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    value = torch.randn(shape, generator=generator)
    if value.ndim == 1:
        is_norm = any(part in name for part in ("norm", "ln_"))
        return value.mul_(BIAS_SIGMA).add_(float(is_norm and name.endswith("weight")))
    if name.endswith("query_embed.weight"):
        return value.mul_(QUERY_SIGMA)
    if name.endswith(("token_embedding.weight", "positional_embedding")):
        return value.mul_(VECTOR_SIGMA)
    if any(part in name for part in ("reference_points", "label_embed", "cls_embed", "presence_token.")):
        return value.mul_(VECTOR_SIGMA)
    gain = SCORE_GAIN if "hs_proj" in name else 1.0
    return value.mul_(gain / math.sqrt(value[0].numel()))

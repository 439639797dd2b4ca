"""Tiny random detectors of transformers' classes, as folders with their tokenizers."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import (
    BertTokenizer,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    Sam3Config,
    Sam3Model,
)

from tests.support.tiny import sam3_config
from tests.support.tiny_clip import TOKENS, write_tiny_clip

HIDDEN = 64
QUERIES = 30  # of Grounding DINO
WORDS = ("red", "mug", "bottle", "spoon", "a", "dr", "pepper", "##s")
UNSCALED = ("vision_encoder", "text_encoder", "presence", "q_proj", "k_proj")
FIRST_WORD = 200  # below are BERT's own marks, where Grounding DINO expects them


def sam3_detector_config(queries: int = 12) -> Sam3Config:
    """With tiny_clip's text tower, and the ViT of tiny.sam3_config."""
    small = {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": HIDDEN}
    text = {
        "vocab_size": 56,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": TOKENS,
        "projection_dim": 32,
        "bos_token_id": 54,
        "eos_token_id": 55,
        "pad_token_id": 55,
    }
    return Sam3Config(
        vision_config=sam3_config(hidden=HIDDEN).vision_config.to_dict(),
        text_config=text,
        geometry_encoder_config={**small, "num_layers": 1},
        detr_encoder_config={**small, "num_layers": 2},
        detr_decoder_config={**small, "num_layers": 2, "num_queries": queries},
        mask_decoder_config={"hidden_size": HIDDEN, "num_attention_heads": 2},
    )


def write_tiny_sam3(folder: Path, gain: float = 1.0) -> Sam3Model:
    """A whole checkpoint with random weights, and the tokenizer of letters of tiny_clip.

    gain: of the matrices from encoder to scores; with 4, logits are as large as trained ones. Those of attention's
    weights stay: sharper ones would make of rounding any difference.
    """
    write_tiny_clip(folder)
    torch.manual_seed(0)
    model = Sam3Model(sam3_detector_config()).eval()
    vary(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1 and not any(part in name for part in UNSCALED):
                value.mul_(gain)
    model.save_pretrained(folder)
    return model


def write_tiny_grounding_dino(folder: Path) -> GroundingDinoForObjectDetection:
    """A whole checkpoint with random weights for small pictures, and a BERT tokenizer that knows WORDS and letters."""
    bert_tokenizer().save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 107}
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    torch.manual_seed(0)
    backbone = {
        "model_type": "swin",
        "image_size": 64,
        "embed_dim": 16,
        "depths": [1, 1, 1],
        "num_heads": [2, 2, 2],
        "window_size": 4,
        "out_indices": [1, 2, 3],
    }
    text = {
        "model_type": "bert",
        "vocab_size": 1100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = GroundingDinoConfig(
        backbone_config=backbone,
        text_config=text,
        num_queries=QUERIES,
        d_model=HIDDEN,
        encoder_layers=1,
        encoder_ffn_dim=HIDDEN,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_ffn_dim=HIDDEN,
        decoder_attention_heads=2,
        max_text_len=24,
    )
    model = GroundingDinoForObjectDetection(config).eval()
    vary(model)
    model.model.decoder.layer_norm.weight.data.fill_(0.1)  # scores that are not all 0 or 1
    for head in model.bbox_embed:
        head.layers[-1].bias.data[2:] = 2.0  # boxes that overlap
    model.save_pretrained(folder)
    return model


def bert_tokenizer() -> BertTokenizer:
    ids = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = dict.fromkeys([*WORDS, *letters, *(f"##{letter}" for letter in letters)])
    ids |= {word: FIRST_WORD + index for index, word in enumerate(words)}
    free = (index for index in range(1100) if index not in set(ids.values()))
    return BertTokenizer(vocab=ids | {f"[unused{index}]": index for index in free})


def vary(model: nn.Module) -> None:
    """Weights at which every part matters, and scores and boxes differ from query to query."""
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.normal_(0, 1.0 / math.sqrt(value[0].numel()))


def picture(height: int = 90, width: int = 120, seed: int = 3) -> np.ndarray:
    """BGR noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)

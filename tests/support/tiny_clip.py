"""A tiny random CLIP of the real classes, and vocabularies of the same kind."""

from pathlib import Path

import numpy as np
import torch
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTokenizer

from sam3_node.detection.vocabulary import Vocabulary

CLIP = "openai/clip-vit-base-patch32"
NAMES = ("mug", "red cup", "bottle", "wooden spoon")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
START = "<|startoftext|>"
END = "<|endoftext|>"
TOKENS = 16


def vocabulary(*names: str, model: str = CLIP, dimension: int = 6) -> Vocabulary:
    """Vectors that depend on the name alone."""
    rows = [np.random.default_rng(list(name.encode())).normal(size=dimension) for name in names]
    return Vocabulary(names, np.array(rows, np.float32), model)


def write_tiny_clip(folder: Path) -> None:
    """A whole checkpoint with random weights, dimension 8, and a tokenizer of letters."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "re", "red</w>", START, END]
    ids = {token: index for index, token in enumerate(tokens)}
    CLIPTokenizer(vocab=ids, merges=[("r", "e"), ("re", "d</w>")]).save_pretrained(folder)
    text = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=8,
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        pad_token_id=ids[END],
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes = {"image_size": 8, "patch_size": 8}
    torch.manual_seed(0)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision | sizes, projection_dim=8)
    CLIPModel(config).save_pretrained(folder)

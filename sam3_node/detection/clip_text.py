"""A phrase encoder with CLIP's text tower, loaded from a local folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from ..errors import ModelError, VocabularyError
from ..types import keep_newest
from .phrases import Vectors, check_token_counts, clean_phrase, normalise_rows, phrase_key
from .pretrained import load_tokenizer, load_whole

BATCH = 64
"""Phrases in one run of the tower."""
CACHE_SIZE = 4096
"""Phrases whose vectors are cached."""
CLASSES = dict.fromkeys(("clip", "clip_text_model"), CLIPTextModelWithProjection)
FILES_HINT = (
    "expected the files of a CLIP in transformers' layout: config.json, model.safetensors (or pytorch_model.bin), "
    "and tokenizer.json (or vocab.json and merges.txt); copy them here from the model that the detector was trained "
    "with, openai/clip-vit-base-patch32 for YOLO-World"
)


class ClipText:
    """A PhraseEncoder that encodes the plain phrase with CLIP (arXiv 2103.00020), on the CPU in float32.

    `folder` has the files in transformers' layout; nothing else is searched. `model` is the model's name, by default
    the folder's name. The vectors of the last `cached` phrases are cached. Not thread-safe. Raises VocabularyError for
    files that are missing, damaged, or not a CLIP.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, model: str | None = None, cached: int = CACHE_SIZE
    ) -> None:
        path = Path(folder)
        self.model = model or path.resolve().name
        self._tower, self._tokenizer = _load(path)
        self.dimension = int(self._tower.config.projection_dim)
        self._cached = cached
        self._cache: dict[str, Vectors] = {}

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Return vectors float32 [K, D] of unit length, one for each of K phrases, in order. Case is ignored.

        Raises RequestError for a phrase that `clean_phrase` refuses, or that has more tokens than the tower accepts.
        """
        # each new phrase once, however often it is asked for
        keys = [phrase_key(clean_phrase(phrase)) for phrase in phrases]
        new = [key for key in dict.fromkeys(keys) if key not in self._cache]
        vectors = {key: self._cache[key] for key in keys if key in self._cache}
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            vectors.update(zip(batch, self._run(batch), strict=True))
        # cached last: a phrase of this call must not push out another one of it
        for key, vector in vectors.items():
            keep_newest(self._cache, key, vector, self._cached)
        if not keys:
            return np.empty((0, self.dimension), np.float32)
        return np.stack([vectors[key] for key in keys])

    def _run(self, texts: list[str]) -> Vectors:
        tokens = self._tokenizer(texts, padding=True, return_tensors="pt")
        # checked before the run: the tower would cut a long phrase off without a word
        counts = tokens.attention_mask.sum(dim=1).tolist()
        check_token_counts(texts, counts, self._tower.config.max_position_embeddings)
        with torch.inference_mode():
            vectors = self._tower(**tokens).text_embeds.numpy()
        try:
            return normalise_rows(vectors)
        except ValueError as error:
            raise VocabularyError(
                f"{self.model} computes unusable vectors ({error}); expected finite vectors, copy its weights again"
            ) from error


def _load(folder: Path) -> tuple[Any, Any]:
    """Return the text tower and its tokenizer."""
    if not folder.is_dir():  # transformers would search elsewhere for it
        raise VocabularyError(f"no folder {folder}; {FILES_HINT}")
    try:
        tower: Any = load_whole(str(folder), CLASSES, torch.float32, is_safe=False)
        return tower, load_tokenizer(str(folder), CLIPTokenizer, tower.config.vocab_size)
    except ModelError as error:
        raise VocabularyError(f"{error}; {FILES_HINT}") from error

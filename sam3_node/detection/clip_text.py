"""CLIP's text tower, from a folder on this machine."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from ..errors import RequestError, VocabularyError
from .phrase_encoder import Vectors, normalise_rows
from .phrases import clean_phrase, phrase_key, quote_phrase

BATCH = 64
CACHED = 4096  # phrases
KINDS = ("clip", "clip_text_model")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
EXPECTED = (
    "expected the files of a CLIP in transformers' layout: config.json, model.safetensors (or pytorch_model.bin), "
    "and tokenizer.json (or vocab.json and merges.txt); copy them here from the model that the detector was trained "
    "with, openai/clip-vit-base-patch32 for YOLO-World"
)


class ClipText:
    """A PhraseEncoder that encodes the bare phrase with CLIP (arXiv 2103.00020), on the CPU in float32.

    `folder` holds the files in transformers' layout; nothing is looked for elsewhere. `model` names them, the folder's
    own name does where it is left out. The last `cached` phrases are remembered. Not for several threads at once.
    Raises VocabularyError for files that are missing, damaged, or not those of a CLIP.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, model: str | None = None, cached: int = CACHED
    ) -> None:
        path = Path(folder)
        self.model = model or path.resolve().name
        self._tower, self._tokenizer = _load(path)
        self.dimension = int(self._tower.config.projection_dim)
        self._cached = cached
        self._cache: OrderedDict[str, Vectors] = OrderedDict()

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Vectors float32 [K, D] of unit length, one for each of K phrases, in their order; case does not matter.

        Raises RequestError for a phrase that `clean_phrase` refuses or that has more tokens than the tower reads.
        """
        keys = [phrase_key(clean_phrase(phrase)) for phrase in phrases]
        new = [key for key in dict.fromkeys(keys) if key not in self._cache]
        found = {key: self._cache[key] for key in keys if key in self._cache}
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            found.update(zip(batch, self._run(batch), strict=True))
        self._remember(found)
        return np.stack([found[key] for key in keys]) if keys else np.empty((0, self.dimension), np.float32)

    def _run(self, texts: list[str]) -> Vectors:
        tokens = self._tokenizer(texts, padding=True, return_tensors="pt")
        length, most = tokens.input_ids.shape[1], self._tower.config.max_position_embeddings
        if length > most:
            counts = tokens.attention_mask.sum(dim=1)
            raise RequestError(
                f"phrase: expected at most {most} tokens, found {int(counts.max())} in "
                f"{quote_phrase(texts[int(counts.argmax())])}; name the object in a few words"
            )
        with torch.inference_mode():
            vectors = self._tower(**tokens).text_embeds.numpy()
        try:
            return normalise_rows(vectors)
        except ValueError as error:
            raise VocabularyError(
                f"{self.model} makes vectors that are not usable ({error}); expected finite ones, "
                "copy its weights again"
            ) from error

    def _remember(self, found: dict[str, Vectors]) -> None:
        """Keep these as the latest used, and drop those that have been unused for longest."""
        for key, vector in found.items():
            self._cache[key] = vector
            self._cache.move_to_end(key)
        while len(self._cache) > self._cached:
            self._cache.popitem(last=False)


def _load(folder: Path) -> tuple[CLIPTextModelWithProjection, CLIPTokenizer]:
    _check_files(folder)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
        if kind not in KINDS:
            raise VocabularyError(f"{folder} holds a {kind} model; {EXPECTED}")
        tower, report = CLIPTextModelWithProjection.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except VocabularyError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError and more
        text = str(error).strip().split("\n")[0][:300]
        raise VocabularyError(f"cannot load {folder}: {type(error).__name__}: {text}; {EXPECTED}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
    if wrong := [str(item) for key in ("missing_keys", "mismatched_keys") for item in sorted(report[key])]:
        raise VocabularyError(
            f"{folder} lacks {len(wrong)} tensors of a CLIP text tower with projection, among them "
            f"{', '.join(wrong[:3])}; {EXPECTED}"
        )
    return tower.eval(), tokenizer


def _check_files(folder: Path) -> None:
    """Before transformers looks for files on its own."""
    if not folder.is_dir():
        raise VocabularyError(f"no folder {folder}; {EXPECTED}")
    lacking = []
    if not (folder / "config.json").is_file():
        lacking.append("config.json")
    if not any((folder / name).is_file() for name in WEIGHTS):
        lacking.append(WEIGHTS[0])
    if not (folder / "tokenizer.json").is_file():
        lacking += [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if lacking:
        raise VocabularyError(f"{folder} lacks {', '.join(lacking)}; {EXPECTED}")

"""Grounding DINO (arXiv 2303.05499): all phrases in one text, each box held against each of its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import BertTokenizer, GroundingDinoForObjectDetection

from ..errors import RequestError, UnknownPhraseError
from ..models.boxes import to_corners, select, to_detections
from ..models.pixels import normalise_frame, unit_letterbox
from ..models.pretrained import (
    IMAGENET,
    Normalisation,
    load_tokenizer,
    load_whole,
    read_normalisation,
    read_preprocessing,
)
from ..models.weight_loading import pick_device, pick_dtype
from ..types import Detection
from .base import raise_model_error
from .phrases import quote_phrase

CLASSES = {"grounding-dino": GroundingDinoForObjectDetection}
IOU = 0.7
LIMIT = 100
SHORTEST, LONGEST = 800, 1333  # pixels of the public weights' input


class TextQuery(NamedTuple):
    """Phrases, the ids [1, T] of the text that they make, and which phrase each token is of [T], K for none."""

    phrases: tuple[str, ...]
    tokens: Tensor
    owners: Tensor


class GroundingDinoDetector:
    """A Detector of transformers' GroundingDinoForObjectDetection.

    Frames are resized until their shorter side has `shortest` pixels or the longer one `longest`. A box scores for a
    phrase what it scores for its best token, and counts for its best phrase. Of one phrase's boxes that overlap by more
    than `iou` the best stays, of all boxes the best `limit`. `dtype` is that of matrix products, by torch's autocast;
    weights and coordinates are float32.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        normalisation: Normalisation = IMAGENET,
        shortest: int = SHORTEST,
        longest: int = LONGEST,
        iou: float = IOU,
        limit: int = LIMIT,
    ) -> None:
        self.name = name
        self._model, self._tokenizer, self._dtype = model, tokenizer, dtype
        self._mean, self._std = (
            torch.tensor(values, device=model.device).view(1, 3, 1, 1) for values in normalisation
        )
        self._shortest, self._longest = shortest, longest
        self._iou, self._limit = iou, limit

    def prepare(self, phrases: Sequence[str]) -> TextQuery:
        """Phrases as one text, such as "red mug. bottle."; raises RequestError for more than the model reads.

        Raises UnknownPhraseError for a phrase without a word that the model knows.
        """
        tokens, owners = self._write([self._words(phrase) for phrase in phrases])
        most = self._model.config.max_text_len
        if len(tokens) > most:
            raise RequestError(
                f"prompts: expected at most {most} tokens in all, found {len(tokens)} in {len(phrases)} phrases; "
                "look for fewer at once, or name them in fewer words"
            )
        with raise_model_error(self.name):
            rows = torch.tensor([tokens, owners], device=self._model.device)
            return TextQuery(tuple(phrases), rows[:1], rows[1])

    def _write(self, words: list[list[int]]) -> tuple[list[int], list[int]]:
        """The text of K phrases, and which phrase each token is of, K for none.

        Known from how the text is put together: it may hold a period, or a phrase that is part of another.
        """
        tokenizer = self._tokenizer
        period, none = tokenizer.convert_tokens_to_ids("."), len(words)
        tokens, owners = [tokenizer.cls_token_id], [none]
        for index, ids in enumerate(words):
            tokens += [*ids, period]
            owners += [*[index] * len(ids), none]
        return [*tokens, tokenizer.sep_token_id], [*owners, none]

    def _words(self, phrase: str) -> list[int]:
        ids = self._tokenizer(phrase.lower(), add_special_tokens=False).input_ids
        if set(ids) <= {self._tokenizer.unk_token_id}:
            raise UnknownPhraseError(
                f"expected words that {self.name} knows, found none in {quote_phrase(phrase)}"
            )
        return ids

    @torch.inference_mode()
    def detect(
        self, image: npt.NDArray[np.uint8], query: TextQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """See Detector."""
        size = input_size(image.shape[:2], self._shortest, self._longest)
        with raise_model_error(self.name):
            pixels = normalise_frame(image, size, self._mean, self._std, torch.float32)
            found = self._run(pixels, query.tokens)
            scores = _by_phrase(found.logits[0].float().sigmoid(), query)
            boxes = to_corners(found.pred_boxes[0].float()).clamp(0, 1)
            chosen = select(boxes, scores, threshold, iou=self._iou, limit=self._limit)
            return to_detections(chosen, unit_letterbox(image), query.phrases)

    def _run(self, pixels: Tensor, tokens: Tensor) -> Any:
        with torch.autocast(pixels.device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._model(pixel_values=pixels, input_ids=tokens)


def input_size(size: tuple[int, ...], shortest: int, longest: int) -> tuple[int, int]:
    """(height, width) of a frame's pixels in the network: as large as both limits allow, its proportions kept.

    A frame that is longer than 4 * longest / shortest times its other side is stretched, since the network finds no
    box where it has fewer positions than queries.
    """
    scale = min(shortest / min(size), longest / max(size))
    height, width = (max(shortest // 4, round(side * scale)) for side in size)
    return height, width


def _by_phrase(scores: Tensor, query: TextQuery) -> Tensor:
    """Scores [Q, T'] of each token -> [Q, K] of each phrase, that of its best token."""
    count, tokens = len(query.phrases), len(query.owners)
    best = scores.new_zeros(len(scores), count + 1)
    owners = query.owners.expand(len(scores), -1)
    return best.scatter_reduce(1, owners, scores[:, :tokens], "amax")[:, :count]


def load_grounding_dino(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> GroundingDinoDetector:
    """Grounding DINO from a folder in transformers' layout, or a hub name, "IDEA-Research/grounding-dino-tiny".

    `device` and `dtype` as for `load_tracker`. Raises ModelError for weights or a tokenizer that cannot serve.
    """
    place = pick_device(device)
    name = os.fspath(name_or_path)
    model: Any = load_whole(name, CLASSES, torch.float32)
    tokenizer = load_tokenizer(name, BertTokenizer, model.config.text_config.vocab_size)
    shortest, longest = _limits(read_preprocessing(name).get("size"))
    return GroundingDinoDetector(
        model.to(place),
        tokenizer,
        name=Path(name).name if os.path.isdir(name) else name,
        dtype=pick_dtype(dtype, place),
        normalisation=read_normalisation(name, IMAGENET),
        shortest=shortest,
        longest=longest,
    )


def _limits(size: Any) -> tuple[int, int]:
    """The input's shorter and longer side as a preprocessor's `size` has them, else the public weights'."""
    if isinstance(size, dict):
        shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
        if isinstance(shortest, int) and isinstance(longest, int) and 32 <= shortest <= longest:
            return shortest, longest
    return SHORTEST, LONGEST

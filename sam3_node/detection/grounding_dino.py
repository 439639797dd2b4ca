"""Grounding DINO (arXiv 2303.05499) as a detector: all phrases form one text, and each box is scored for each token."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import BertTokenizer, GroundingDinoForObjectDetection

from ..errors import RequestError, UnknownPhraseError
from ..models import weight_files
from ..models.pixels import input_size, normalise_frame, select, to_corners, to_detections, unit_letterbox
from ..types import Detection, Image
from . import pretrained
from .detectors import MAX_DETECTIONS, MAX_IOU, raise_model_error
from .phrases import quote_phrase

CLASSES = {"grounding-dino": GroundingDinoForObjectDetection}
SHORT_SIDE = 800
"""Shorter side of the public weights' input, in pixels."""
MAX_LONG_SIDE = 1333
"""Longest side of that input. A long frame has a shorter side below SHORT_SIDE."""
MIN_SIDE = 32
"""Shortest side, in pixels, that a preprocessor's file may name."""


class TextQuery(NamedTuple):
    """K phrases as one text of T tokens."""

    phrases: tuple[str, ...]
    tokens: Tensor
    """ids [1, T]"""
    owners: Tensor
    """[T]: index of the phrase of each token, K for none"""


class GroundingDinoDetector:
    """A Detector with transformers' GroundingDinoForObjectDetection.

    Frames are resized until the shorter side has `shortest` pixels or the longer side `longest`. A box's score for a
    phrase is its score for the phrase's best token; its label is its best phrase. With `text_score`, each token of the
    phrase must exceed that: the label that transformers would give with this text_threshold has the whole phrase. Of
    boxes of one phrase with an IoU above `iou`, only the best is kept; of all boxes, the best `limit`. `dtype` is used
    for matrix products, by torch's autocast. Weights and coordinates are float32.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        normalisation: weight_files.Normalisation = weight_files.IMAGENET,
        shortest: int = SHORT_SIDE,
        longest: int = MAX_LONG_SIDE,
        iou: float = MAX_IOU,
        limit: int = MAX_DETECTIONS,
        text_score: float = 0.0,
    ) -> None:
        self.name = name
        self._model = model
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._mean, self._std = normalisation.to_tensors(model.device)
        self._shortest = shortest
        self._longest = longest
        self._iou = iou
        self._limit = limit
        self._text_score = text_score

    def prepare(self, phrases: Sequence[str]) -> TextQuery:
        """Join the phrases into one text, such as "red mug. bottle.".

        Raises RequestError for a text with more tokens than the model accepts. Raises UnknownPhraseError for a phrase
        without a word that the model knows.
        """
        tokens, owners = self._join_phrases([self._word_tokens(phrase) for phrase in phrases])
        # one text for all phrases, so all of them share its limit
        max_tokens = self._model.config.max_text_len
        if len(tokens) > max_tokens:
            raise RequestError(
                f"prompts: expected at most {max_tokens} tokens in all, found {len(tokens)} in {len(phrases)} phrases; "
                "use fewer prompts at once, or prompts with fewer words"
            )
        with raise_model_error(self.name):
            rows = torch.tensor([tokens, owners], device=self._model.device)
            return TextQuery(tuple(phrases), rows[:1], rows[1])

    def _join_phrases(self, words: list[list[int]]) -> tuple[list[int], list[int]]:
        """Return the tokens of the text, and the index of each token's phrase, K for none.

        The indices are recorded while the text is built. They could not be found in the text itself, because a phrase
        may contain a period, or may be part of another phrase.
        """
        tokenizer = self._tokenizer
        period = tokenizer.convert_tokens_to_ids(".")
        none = len(words)
        tokens = [tokenizer.cls_token_id]
        owners = [none]
        # each phrase ends with a period, which belongs to none
        for index, ids in enumerate(words):
            tokens += [*ids, period]
            owners += [*[index] * len(ids), none]
        return [*tokens, tokenizer.sep_token_id], [*owners, none]

    def _word_tokens(self, phrase: str) -> list[int]:
        ids: list[int] = self._tokenizer(phrase.lower(), add_special_tokens=False).input_ids
        # a word that is not known would match anything
        if set(ids) <= {self._tokenizer.unk_token_id}:
            raise UnknownPhraseError(
                f"expected words that {self.name} knows, found none in {quote_phrase(phrase)}"
            )
        return ids

    @torch.inference_mode()
    def detect(
        self, image: Image, query: TextQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Detect objects on a frame; see `Detector.detect`."""
        size = input_size(image.shape[:2], self._shortest, self._longest)
        with raise_model_error(self.name):
            pixels = normalise_frame(image, size, self._mean, self._std, torch.float32)
            with torch.autocast(pixels.device.type, self._dtype, enabled=self._dtype != torch.float32):
                output = self._model(pixel_values=pixels, input_ids=query.tokens)
            # each phrase takes the score of its best token; corners may lie outside the frame
            scores = _score_phrases(output.logits[0].float().sigmoid(), query, self._text_score)
            boxes = to_corners(output.pred_boxes[0].float()).clamp(0, 1)
            chosen = select(boxes, scores, threshold, iou=self._iou, limit=self._limit)
            return to_detections(chosen, unit_letterbox(image), query.phrases)


def _score_phrases(scores: Tensor, query: TextQuery, text_score: float) -> Tensor:
    """Turn the scores [Q, T'] of tokens into scores [Q, K] of phrases: each phrase's best token counts.

    A phrase with a token that does not exceed `text_score` has the score 0.
    """
    count = len(query.phrases)
    scores = scores[:, : len(query.owners)]
    # one more column takes the scores of tokens that belong to no phrase
    best = scores.new_zeros(len(scores), count + 1)
    owners = query.owners.expand(len(scores), -1)
    best = best.scatter_reduce(1, owners, scores, "amax")[:, :count]
    if not text_score:
        return best
    worst = scores.new_ones(len(scores), count + 1)
    worst = worst.scatter_reduce(1, owners, scores, "amin")[:, :count]
    return torch.where(worst > text_score, best, 0)


def load_grounding_dino(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    text_score: float = 0.0,
) -> GroundingDinoDetector:
    """Load Grounding DINO from a folder in transformers' layout, or by hub name: "IDEA-Research/grounding-dino-tiny".

    See `load_tracker` for `device` and `dtype`. Raises ModelError if the weights or the tokenizer cannot be used.
    """
    chosen_device = weight_files.pick_device(device)
    name = os.fspath(name_or_path)
    # in float32: autocast converts what may be computed in less
    model: Any = pretrained.load_whole(name, CLASSES, torch.float32)
    tokenizer = pretrained.load_tokenizer(name, BertTokenizer, model.config.text_config.vocab_size)
    shortest, longest = _limits(weight_files.read_preprocessing(name).get("size"))
    return GroundingDinoDetector(
        model.to(chosen_device),
        tokenizer,
        name=weight_files.name_weights(name),
        dtype=weight_files.pick_dtype(dtype, chosen_device),
        normalisation=weight_files.read_normalisation(name, weight_files.IMAGENET),
        shortest=shortest,
        longest=longest,
        text_score=text_score,
    )


def _limits(size: Any) -> tuple[int, int]:
    """Return the input's shorter and longer side from a preprocessor's `size`, by default of the public weights."""
    if isinstance(size, dict):
        shortest = size.get("shortest_edge")
        longest = size.get("longest_edge")
        if isinstance(shortest, int) and isinstance(longest, int) and MIN_SIDE <= shortest <= longest:
            return shortest, longest
    return SHORT_SIDE, MAX_LONG_SIDE

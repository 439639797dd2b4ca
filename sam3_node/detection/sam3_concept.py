"""SAM 3's own detector (arXiv 2511.16719): for each phrase, all its instances on the frame."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTokenizer, Sam3Model
from transformers.models.sam3.modeling_sam3 import inverse_sigmoid

from ..errors import RequestError
from ..models.boxes import MAX_CANDIDATES, Selection, to_corners, select, to_detections
from ..models.pixels import normalise_frame, unit_letterbox
from ..models.pretrained import CENTRED, Normalisation, load_tokenizer, load_whole, read_normalisation
from ..models.sam.tracker_model import TrackerModel
from ..models.sam.vit import WindowedViT, side
from ..models.weight_loading import pick_device, pick_dtype
from ..types import Detection
from .base import raise_model_error
from .phrases import quote_phrase

CLASSES = {"sam3": Sam3Model, "sam3_video": Sam3Model}
IOU = 0.7
LIMIT = 100
PHRASE_BATCH = 4  # that go through the detector at once: each has a copy of the image's tokens
TEXT_BATCH = 64  # that go through the text tower at once


class ConceptQuery(NamedTuple):
    """Phrases with the features of their tokens [K, T, C], and which tokens these are, bool [K, T]."""

    phrases: tuple[str, ...]
    text: Tensor
    mask: Tensor


class ConceptNetwork(nn.Module):
    """The parts of a transformers Sam3Model that find boxes; those that make masks of them are left out.

    Its last part, the decoder, computes in float32 whatever the others do: in bfloat16 a box is off by pixels.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        self.trunk: nn.Module = WindowedViT(vision.backbone)
        self.level, self.position = vision.neck.fpn_layers[-2], vision.neck.position_encoding
        self.text_encoder, self.text_projection = source.text_encoder, source.text_projection
        self.encoder = source.detr_encoder
        self.decoder, self.scoring = source.detr_decoder.float(), source.dot_product_scoring.float()

    def read(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Ids and which of them are text, both [K, T] -> features [K, T, C]."""
        found = self.text_encoder(input_ids=tokens, attention_mask=mask)
        return self.text_projection(found.last_hidden_state)

    def encode(self, trunk: Tensor) -> tuple[Tensor, Tensor]:
        """What the trunk makes of pixels, [1, D, h, w] -> features and their positions, both [1, C, h, w]."""
        features = self.level(trunk)
        return features, self.position(features.shape, features.device, features.dtype)

    def forward(
        self, features: Tensor, position: Tensor, text: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """An image as `encode` gives it, and K phrases -> boxes [K, Q, 4] as parts of it, scores [K, Q], float32."""
        encoded = self.encoder(
            vision_features=[features.expand(len(text), -1, -1, -1)],
            text_features=text,
            vision_pos_embeds=[position.expand(len(text), -1, -1, -1)],
            text_mask=mask,
        )
        text = text.float()
        decoded = self.decoder(
            vision_features=encoded.last_hidden_state.float(),
            text_features=text,
            vision_pos_encoding=encoded.pos_embeds_flattened.float(),
            text_mask=mask,
            spatial_shapes=encoded.spatial_shapes,
        )
        last = decoded.intermediate_hidden_states[-1:]
        logits = self.scoring(last, text, mask)[0, ..., 0]
        offsets = self.decoder.box_head(last[0])
        boxes = (inverse_sigmoid(decoded.reference_boxes[-1]) + offsets).sigmoid()
        return to_corners(boxes).clamp(0, 1), logits.sigmoid() * decoded.presence_logits[-1].sigmoid()


class Sam3ConceptDetector:
    """A Detector of transformers' Sam3Model.

    A frame is encoded once for all phrases. Of one phrase's boxes that overlap by more than `iou` the best stays, of
    all boxes the best `limit`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        normalisation: Normalisation = CENTRED,
        iou: float = IOU,
        limit: int = LIMIT,
    ) -> None:
        self.name = name
        self._network, self._tokenizer = ConceptNetwork(model), tokenizer
        self._device, self._dtype = model.device, model.dtype
        self._mean, self._std = (
            torch.tensor(values, device=self._device).view(1, 3, 1, 1) for values in normalisation
        )
        self._side = side(model.config.vision_config.image_size)
        self._max_tokens = model.config.text_config.max_position_embeddings
        self._iou, self._limit = iou, limit

    @torch.inference_mode()
    def prepare(self, phrases: Sequence[str]) -> ConceptQuery:
        """Phrases with their features; raises RequestError for one of more tokens than the model reads."""
        counts = [len(ids) for ids in self._tokenizer(list(phrases)).input_ids]
        if max(counts) > self._max_tokens:
            raise RequestError(
                f"phrase: expected at most {self._max_tokens} tokens, found {max(counts)} in "
                f"{quote_phrase(phrases[counts.index(max(counts))])}; name the object in a few words"
            )
        tokens = self._tokenizer(
            list(phrases), padding="max_length", max_length=self._max_tokens, return_tensors="pt"
        )
        with raise_model_error(self.name):
            ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
            batches = zip(ids.split(TEXT_BATCH), mask.split(TEXT_BATCH), strict=True)
            return ConceptQuery(
                tuple(phrases), torch.cat([self._network.read(*batch) for batch in batches]), mask.bool()
            )

    @torch.inference_mode()
    def detect(
        self, image: npt.NDArray[np.uint8], query: ConceptQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """See Detector."""
        with raise_model_error(self.name):
            if trunk is None:
                trunk = self._network.trunk(self._pixels(image))
            encoded = self._network.encode(trunk)
            batches = zip(query.text.split(PHRASE_BATCH), query.mask.split(PHRASE_BATCH), strict=True)
            found = [self._network(*encoded, *batch) for batch in batches]
            boxes, scores = (torch.cat(parts) for parts in zip(*found, strict=True))
            chosen = self._choose(boxes, scores, threshold)
            return to_detections(chosen, unit_letterbox(image), query.phrases)

    def share_trunk_with(self, tracker: TrackerModel) -> bool:
        """Take over the tracker's trunk, if its weights and pixels are this one's, and let go of its own.

        From then on `detect` is to be given what it makes of the frame.
        """
        same = tracker.image_size == self._side and tracker.dtype == self._dtype
        same = same and torch.equal(tracker.mean, self._mean) and torch.equal(tracker.std, self._std)
        if not (same and _equal(tracker.trunk, self._network.trunk)):
            return False
        self._network.trunk = tracker.share_trunk()
        return True

    def _pixels(self, image: npt.NDArray[np.uint8]) -> Tensor:
        """[1, 3, S, S]"""
        return normalise_frame(image, (self._side, self._side), self._mean, self._std, self._dtype)

    def _choose(self, boxes: Tensor, scores: Tensor, threshold: float) -> Selection:
        """Of boxes [K, Q, 4] with scores [K, Q], each of which counts for its own phrase alone."""
        best, index = scores.flatten().topk(min(MAX_CANDIDATES, scores.numel()))
        table = best[:, None] * F.one_hot(index // scores.shape[1], len(scores))
        return select(boxes.flatten(0, 1)[index], table, threshold, iou=self._iou, limit=self._limit)


def _equal(first: nn.Module | None, second: nn.Module) -> bool:
    """Whether two networks have the same tensors."""
    if first is None:
        return False
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )


def load_sam3_concept(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    tracker: TrackerModel | None = None,
) -> Sam3ConceptDetector:
    """SAM 3's detector from a folder in transformers' layout, or a hub name such as "facebook/sam3".

    `device` and `dtype` as for `load_tracker`. tracker: one whose trunk is shared where it is the same. Raises
    ModelError for weights or a tokenizer that cannot serve.
    """
    place = pick_device(device)
    name = os.fspath(name_or_path)
    model: Any = load_whole(name, CLASSES, pick_dtype(dtype, place))
    tokenizer = load_tokenizer(name, CLIPTokenizer, model.config.text_config.vocab_size)
    detector = Sam3ConceptDetector(
        model.to(place),
        tokenizer,
        name=Path(name).name if os.path.isdir(name) else name,
        normalisation=read_normalisation(name, CENTRED),
    )
    if tracker is not None:
        detector.share_trunk_with(tracker)
    return detector

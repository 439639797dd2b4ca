"""YOLO-World as a detector: phrases are encoded once, and their vectors enter the network with each frame."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ModelError
from ..models.pixels import letterbox, select, to_detections
from ..models.yolo.network import STRIDES, Detections, YoloWorld
from ..types import Detection, Image
from .detectors import MAX_DETECTIONS, MAX_IOU, KnownNames, raise_model_error
from .phrases import PhraseEncoder, check_phrase_encoder
from .vocabulary import find_contrasts, list_known


class VectorQuery(NamedTuple):
    """Phrases with their vectors [K, D], on the network's device and in its dtype."""

    phrases: tuple[str, ...]
    vectors: Tensor
    contrasts: Tensor | None = None
    """[K, 2, M, D], float32: phrases of the vocabulary that differ from each by its look, and by the thing; see
    `Vocabulary.contrasts`. Rows of NaN where there are fewer than M"""


class YoloWorldDetector:
    """A Detector with YOLO-World (arXiv 2401.17270). `encoder` turns its phrases into vectors.

    Frames are fitted into `image_size` pixels, (H, W) or the side of a square, as the weights' `resize` says. Of boxes
    of one phrase with an IoU above `iou`, only the best is kept; of all boxes, the best `limit`. Raises VocabularyError
    for an encoder whose vectors have another dimension.
    """

    def __init__(
        self,
        model: YoloWorld,
        encoder: PhraseEncoder,
        *,
        name: str,
        image_size: int | tuple[int, int],
        iou: float = MAX_IOU,
        limit: int = MAX_DETECTIONS,
    ) -> None:
        # an encoder of another model would find nothing, without any error
        check_phrase_encoder(encoder, model.config.text_channels)
        self.name = name
        self.model = model
        self.network: Callable[[Tensor, Tensor], Detections] = model
        """The network that runs on frames: the model, or an engine that replaces it."""
        self._encoder = encoder
        self._size = _checked_size(image_size)
        self._resize = model.config.resize
        self._iou = iou
        self._limit = limit

    @property
    def known_names(self) -> KnownNames:
        """The phrases of its vocabulary; any other as well if there is a text encoder."""
        return list_known(self._encoder)

    def prepare(self, phrases: Sequence[str]) -> VectorQuery:
        """Encode the phrases. Raises RequestError for a phrase without a vector."""
        # encoded once; each frame only multiplies with the vectors
        vectors = torch.from_numpy(self._encoder.encode(phrases))
        stem = self.model.backbone.stem.conv.weight
        with raise_model_error(self.name):
            contrasts = torch.from_numpy(find_contrasts(self._encoder, phrases)).to(stem.device)
            return VectorQuery(tuple(phrases), vectors.to(stem.device, stem.dtype), contrasts)

    @torch.inference_mode()
    def detect(
        self, image: Image, query: VectorQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Detect objects on a frame; see `Detector.detect`."""
        with raise_model_error(self.name):
            # as the public implementation does it; an engine takes whole squares alone
            stride = None
            if self.network is self.model and self._resize == "bilinear":
                stride = STRIDES[-1]
            pixels, frame = letterbox(
                image, self._size, device=query.vectors.device, resize=self._resize, stride=stride
            )
            if self.network is not self.model:  # an engine has boxes and scores only
                boxes, scores = self.network(pixels, query.vectors)
                chosen = select(boxes[0], scores[0], threshold, iou=self._iou, limit=self._limit)
                return to_detections(chosen, frame, query.phrases)
            found = self.model.predict(pixels, query.vectors)
            boxes = found.boxes()
            scores = found.logits.sigmoid()
            chosen = select(boxes[0], scores[0], threshold, iou=self._iou, limit=self._limit)
            # how much better each box fits its own phrase than the phrases that are nearly the same
            margins = compare(found.embeddings[0, chosen.anchors], chosen.classes, query)
            return to_detections(chosen, frame, query.phrases, margins)


def compare(embeddings: Tensor, classes: Tensor, query: VectorQuery) -> Tensor | None:
    """Return the margins [n, 2] of n boxes with embeddings [n, D] to the contrasts of their phrases; NaN for none."""
    if query.contrasts is None:
        return None
    # NaN, where a phrase has fewer contrasts than another, must not win
    own = torch.einsum("nd,nd->n", embeddings, query.vectors[classes].float())
    others = torch.einsum("nd,ngmd->ngm", embeddings, query.contrasts[classes])
    best = others.nan_to_num(nan=-torch.inf).amax(dim=2)
    return torch.where(best.isfinite(), own[:, None] - best, torch.nan)


def _checked_size(size: int | tuple[int, int]) -> tuple[int, int]:
    sides = size
    if isinstance(sides, int):
        sides = (sides, sides)
    if any(side <= 0 or side % STRIDES[-1] for side in sides):
        raise ModelError(
            f"YOLO-World: expected an image size of positive multiples of {STRIDES[-1]}, found {list(sides)}"
        )
    return sides

"""SAM 3's own detector (arXiv 2511.16719): it finds all instances of each phrase on a frame."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTokenizer, Sam3Model
from transformers.models.sam3.modeling_sam3 import inverse_sigmoid

from ..errors import ModelError
from ..models import weight_files
from ..models.pixels import (
    MAX_CANDIDATES,
    SelectedBoxes,
    normalise_frame,
    select,
    to_corners,
    to_detections,
    unit_letterbox,
)
from ..models.sam.configuration import side
from ..models.sam.tracker_model import TrackerModel
from ..models.sam.vit import WindowedViT
from ..models.sam31.loading import find_checkpoint, read_tensors
from ..types import Detection, Image
from . import pretrained
from .detectors import MAX_DETECTIONS, MAX_IOU, Boxes, Exemplar, raise_model_error
from .phrases import check_token_counts
from .sam3_concept_weights import build_sam3_model

CLASSES = {"sam3": Sam3Model, "sam3_video": Sam3Model}
PHRASE_BATCH = 4
"""Phrases in one run of the detector. Each has a copy of the image's tokens in memory."""
TEXT_BATCH = 64
"""Phrases in one run of the text tower."""
TOKENIZER = "facebook/sam3"
"""Weights whose tokenizer is taken for SAM 3.1, where none lies beside its file. Both have SAM 3's text encoder."""
NO_TEXT = "visual"
"""Text of an exemplar without words, as in the public implementation."""


class ConceptQuery(NamedTuple):
    """K encoded phrases with T tokens each: those of the text, then those of the exemplar."""

    phrases: tuple[str, ...]
    text: Tensor
    """features of the tokens, [K, T, C]"""
    mask: Tensor
    """bool [K, T]: True for tokens of the phrase, False for padding"""


class ConceptNetwork(nn.Module):
    """The parts of a transformers Sam3Model that find boxes, without the parts that turn boxes into masks.

    The last part, the decoder, always computes in float32: in bfloat16 the boxes are wrong by several pixels.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        self.trunk: nn.Module = WindowedViT(vision.backbone)
        # of the feature pyramid, the detector reads one level alone
        self.level = vision.neck.fpn_layers[-2]
        self.position = vision.neck.position_encoding
        self.text_encoder = source.text_encoder
        self.text_projection = source.text_projection
        self.geometry = source.geometry_encoder
        self.encoder = source.detr_encoder
        # in float32, see above
        self.decoder = source.detr_decoder.float()
        self.scoring = source.dot_product_scoring.float()

    def encode_text(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Encode token ids [K, T], with mask [K, T] nonzero for tokens of the phrase, into features [K, T, C]."""
        output = self.text_encoder(input_ids=tokens, attention_mask=mask)
        features: Tensor = self.text_projection(output.last_hidden_state)
        return features

    def encode(self, trunk: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the trunk's output [1, D, h, w] into features and their position encoding, both [1, C, h, w]."""
        features = self.level(trunk)
        return features, self.position(features.shape, features.device, features.dtype)

    def encode_boxes(self, features: Tensor, position: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """Encode boxes [N, 4] in 0..1 (x0 y0 x1 y1) on an encoded image into tokens [N + 1, C].

        labels: int64 [N], 1 for boxes like those to find, 0 for others. As transformers' Sam3GeometryEncoder, whose
        modules these are; that needs torchvision.
        """
        parts = self.geometry
        dtype = features.dtype
        # the features within each box
        size = torch.tensor(features.shape[:1:-1] * 2, device=boxes.device)  # of the grid: w h w h
        normalised = parts.vision_layer_norm(features.movedim(1, -1)).movedim(-1, 1)
        pooled = pool_boxes(normalised, boxes * size, parts.roi_size)
        # position and size of each box, encoded
        sides = boxes[:, 2:] - boxes[:, :2]
        centres = boxes[:, :2] + sides / 2
        box_position = parts._encode_box_coordinates(*centres.unbind(1), *sides.unbind(1))
        # a token for each box: its position, its features and its label; and one token for all of them
        tokens = parts.boxes_direct_project(torch.cat([centres, sides], dim=1).to(dtype))
        tokens = tokens + parts.boxes_pool_project(pooled).flatten(1)
        tokens = tokens + parts.boxes_pos_enc_project(box_position.to(dtype)) + parts.label_embed(labels)
        tokens = torch.cat([tokens, parts.cls_embed.weight])[None]
        tokens = parts.prompt_layer_norm(parts.final_proj(tokens))
        # the tokens look at the image
        image, where = (part.flatten(2).transpose(1, 2) for part in (features, position))
        for layer in parts.layers:
            tokens = layer(tokens, image, where, prompt_mask=None)
        encoded: Tensor = parts.output_layer_norm(tokens)[0]
        return encoded

    def forward(
        self, features: Tensor, position: Tensor, text: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Find K phrases on an encoded image; return float32 boxes [K, Q, 4] in 0..1 and scores [K, Q]."""
        # the image's tokens, which have read the phrase
        encoded = self.encoder(
            vision_features=[features.expand(len(text), -1, -1, -1)],
            text_features=text,
            vision_pos_embeds=[position.expand(len(text), -1, -1, -1)],
            text_mask=mask,
        )
        # boxes that look for the phrase
        text = text.float()
        decoded = self.decoder(
            vision_features=encoded.last_hidden_state.float(),
            text_features=text,
            vision_pos_encoding=encoded.pos_embeds_flattened.float(),
            text_mask=mask,
            spatial_shapes=encoded.spatial_shapes,
        )
        # the last layer's boxes, each scored for the phrase, and by the probability that the phrase is there at all
        last = decoded.intermediate_hidden_states[-1:]
        logits = self.scoring(last, text, mask)[0, ..., 0]
        offsets = self.decoder.box_head(last[0])
        boxes = (inverse_sigmoid(decoded.reference_boxes[-1]) + offsets).sigmoid()
        return to_corners(boxes).clamp(0, 1), logits.sigmoid() * decoded.presence_logits[-1].sigmoid()


class Sam3ConceptDetector:
    """A Detector with transformers' Sam3Model.

    A frame is encoded once for all phrases. Of boxes of one phrase with an IoU above `iou`, only the best is kept; of
    all boxes, the best `limit`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        normalisation: weight_files.Normalisation = weight_files.CENTRED,
        iou: float = MAX_IOU,
        limit: int = MAX_DETECTIONS,
    ) -> None:
        self.name = name
        self._network = ConceptNetwork(model)
        self._tokenizer = tokenizer
        self._device = model.device
        self._dtype = model.dtype
        self._mean, self._std = normalisation.to_tensors(self._device)
        self._side = side(model.config.vision_config.image_size)
        self._max_tokens = model.config.text_config.max_position_embeddings
        self._iou = iou
        self._limit = limit

    @torch.inference_mode()
    def prepare(
        self, phrases: Sequence[str], exemplars: Mapping[str, Exemplar] = MappingProxyType({})
    ) -> ConceptQuery:
        """Encode the phrases, some of them with an exemplar.

        Raises RequestError for a phrase with more tokens than the model accepts.
        """
        # an exemplar has words of its own, or none; its name only names what is found
        texts = []
        for name in phrases:
            if name in exemplars:
                texts.append(exemplars[name].text or NO_TEXT)
            else:
                texts.append(name)
        counts = [len(ids) for ids in self._tokenizer(texts).input_ids]
        check_token_counts(texts, counts, self._max_tokens)
        tokens = self._tokenizer(
            texts, padding="max_length", max_length=self._max_tokens, return_tensors="pt"
        )
        with raise_model_error(self.name):
            ids = tokens.input_ids.to(self._device)
            mask = tokens.attention_mask.to(self._device)
            batches = zip(torch.split(ids, TEXT_BATCH), torch.split(mask, TEXT_BATCH), strict=True)
            text = torch.cat([self._network.encode_text(*batch) for batch in batches])
            # the tokens of each phrase's boxes, none for most phrases, behind those of its text
            shown = []
            for name in phrases:
                parts = [text[0, :0]]
                if name in exemplars:
                    parts += [view.tokens.to(text) for view in exemplars[name].views.values()]
                shown.append(torch.cat(parts))
            padded = nn.utils.rnn.pad_sequence(shown, batch_first=True)
            lengths = torch.tensor([[len(part)] for part in shown], device=self._device)
            is_shown = torch.arange(padded.shape[1], device=self._device) < lengths
            return ConceptQuery(
                tuple(phrases), torch.cat([text, padded], dim=1), torch.cat([mask.bool(), is_shown], dim=1)
            )

    @torch.inference_mode()
    def encode_exemplar(self, image: Image, boxes: Boxes, labels: Sequence[int]) -> Tensor:
        """Encode boxes on an image; see `ExemplarDetector.encode_exemplar`."""
        with raise_model_error(self.name):
            # in shares of the image, which the network resizes
            shares = torch.tensor(boxes, dtype=torch.float32) / torch.tensor(image.shape[1::-1] * 2)
            given = shares.to(self._device), torch.tensor(labels, device=self._device)
            return self._network.encode_boxes(*self._encode(image), *given).cpu()

    @torch.inference_mode()
    def detect(
        self, image: Image, query: ConceptQuery, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Detect objects on a frame; see `Detector.detect`."""
        with raise_model_error(self.name):
            encoded = self._encode(image, trunk)
            # in batches, because each phrase has a copy of the image's tokens
            batches = zip(
                torch.split(query.text, PHRASE_BATCH), torch.split(query.mask, PHRASE_BATCH), strict=True
            )
            outputs = [self._network(*encoded, *batch) for batch in batches]
            boxes, scores = (torch.cat(parts) for parts in zip(*outputs, strict=True))
            chosen = self._choose(boxes, scores, threshold)
            return to_detections(chosen, unit_letterbox(image), query.phrases)

    def _encode(self, image: Image, trunk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # a trunk that is shared has run for the tracker already
        if trunk is None:
            pixels = normalise_frame(image, (self._side,) * 2, self._mean, self._std, self._dtype)
            trunk = self._network.trunk(pixels)
        return self._network.encode(trunk)

    def share_trunk_with(self, tracker: TrackerModel) -> bool:
        """Use the tracker's trunk instead of the own one, if weights and preprocessing are equal; return True then.

        From then on, callers must pass the output of the shared trunk to `detect`.
        """
        # the trunk may be shared only if it would compute the very same numbers
        same = tracker.image_size == self._side and tracker.dtype == self._dtype
        same = same and torch.equal(tracker.mean, self._mean) and torch.equal(tracker.std, self._std)
        if not (same and _equal(tracker.trunk, self._network.trunk)):
            return False
        self._network.trunk = tracker.share_trunk()
        return True

    def _choose(self, boxes: Tensor, scores: Tensor, threshold: float) -> SelectedBoxes:
        """Select among boxes [K, Q, 4] with scores [K, Q]. A box counts only for its own phrase."""
        # a table of scores with one column for each phrase, in which a box has its own phrase's score alone
        best, index = scores.flatten().topk(min(MAX_CANDIDATES, scores.numel()))
        table = best[:, None] * F.one_hot(index // scores.shape[1], len(scores))
        return select(boxes.flatten(0, 1)[index], table, threshold, iou=self._iou, limit=self._limit)


def pool_boxes(features: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Average features [1, C, h, w] in a grid over each box [N, 4] (x0 y0 x1 y1 in cells): [N, C, size, size].

    As torchvision's `roi_align` with its defaults (arXiv 1703.06870), in float32.
    """
    height, width = features.shape[2:]
    pooled = []
    for x0, y0, x1, y1 in boxes.tolist():
        # as many samples in each cell of the grid, at most one feature apart
        x, y = (_sample(*line, size).to(features.device) for line in ((x0, x1), (y0, y1)))
        # the middle of the first cell is 0 there, -1 here
        grid = torch.meshgrid(2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1, indexing="xy")
        samples = F.grid_sample(
            features.float(), torch.stack(grid, dim=2)[None], padding_mode="border", align_corners=True
        )
        # samples outside the image count as 0
        is_inside = (y <= height)[:, None] & (x <= width)
        pooled.append(F.adaptive_avg_pool2d(samples * is_inside, size))
    return torch.cat(pooled).to(features.dtype)


def _sample(low: float, high: float, bins: int) -> Tensor:
    """Return the coordinates at which a side of a box is sampled: at most a cell apart, as many in each bin."""
    side = max(high - low, 1.0)
    count = bins * math.ceil(side / bins)
    return low + (torch.arange(count) + 0.5) * side / count


def _equal(first: nn.Module | None, second: nn.Module) -> bool:
    """Return True if two networks have the same tensors."""
    if first is None:
        return False
    own = first.state_dict()
    other = second.state_dict()
    return own.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in own.items())


def load_sam3_concept(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    tracker: TrackerModel | None = None,
) -> Sam3ConceptDetector:
    """Load SAM 3's detector from a folder in transformers' layout, or by hub name, such as "facebook/sam3".

    SAM 3.1's may also be a file, or the one file of a folder. Its tokenizer lies beside the file, or is that of
    facebook/sam3. See `load_tracker` for `device` and `dtype`. tracker: a model whose trunk is shared if it is equal.
    Raises ModelError if the weights or the tokenizer cannot be used.
    """
    chosen_device = weight_files.pick_device(device)
    name = os.fspath(name_or_path)
    chosen_dtype = weight_files.pick_dtype(dtype, chosen_device)
    model: Any
    if checkpoint := find_checkpoint(name):
        model = build_sam3_model(read_tensors(checkpoint), name, chosen_dtype)
        tokenizer = _load_sam31_tokenizer(checkpoint, model.config.text_config.vocab_size)
        normalisation = weight_files.CENTRED
    else:
        model = pretrained.load_whole(name, CLASSES, chosen_dtype)
        tokenizer = pretrained.load_tokenizer(name, CLIPTokenizer, model.config.text_config.vocab_size)
        normalisation = weight_files.read_normalisation(name, weight_files.CENTRED)
    detector = Sam3ConceptDetector(
        model.to(chosen_device),
        tokenizer,
        name=weight_files.name_weights(name),
        normalisation=normalisation,
    )
    # shared if equal, so that a frame is encoded once for both
    if tracker is not None:
        detector.share_trunk_with(tracker)
    return detector


def _load_sam31_tokenizer(checkpoint: Path, tokens: int) -> Any:
    """Load the tokenizer beside SAM 3.1's file, or else that of SAM 3, which is the same."""
    folder = checkpoint.parent
    if has_tokenizer(folder):
        return pretrained.load_tokenizer(os.fspath(folder), CLIPTokenizer, tokens)
    try:
        return pretrained.load_tokenizer(TOKENIZER, CLIPTokenizer, tokens)
    except ModelError as error:
        explained = explain_tokenizer(checkpoint, str(error))
        explained.may_pass = error.may_pass
        raise explained from error


def has_tokenizer(folder: Path) -> bool:
    """Return True if a tokenizer lies in a folder."""
    return (folder / pretrained.FAST_TOKENIZER).is_file() or (folder / "vocab.json").is_file()


def explain_tokenizer(checkpoint: Path, found: str) -> ModelError:
    """Return the error of a SAM 3.1 checkpoint without a tokenizer; `found` says why that of the hub is missing."""
    return ModelError(
        f"{checkpoint}: expected a tokenizer, which SAM 3.1's checkpoint does not hold, as "
        f"{pretrained.FAST_TOKENIZER} (or vocab.json and merges.txt) beside it or from {TOKENIZER} on the hub; "
        f"found neither ({found}); copy the tokenizer of {TOKENIZER} into {checkpoint.parent}"
    )

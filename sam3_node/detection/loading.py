"""Load a detector of any kind. The modules of a kind are imported only when it is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, VocabularyError, did_you_mean
from .detectors import NANO, VOCABULARY, Detector, File
from .phrases import PhraseEncoder
from .vocabulary import Vocabulary, VocabularyWithFallback

if TYPE_CHECKING:
    import torch

    from ..models import TrackerModel
    from ..settings import DetectorSettings

KINDS = ("yolo-world", "sam3-concept", "grounding-dino")
"""Kinds that `load_detector` knows."""


def load_detector(
    kind: str,
    name_or_path: File = "nano",
    *,
    vocabulary: File | None = None,
    text_encoder: File | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    image_size: int = 0,
    text_score: float = 0.0,
    tracker: TrackerModel | None = None,
) -> Detector:
    """Load a detector of `kind` "yolo-world", "sam3-concept" or "grounding-dino".

    name_or_path: "nano" (the bundled yolo-world) or a folder of weights; for the other two kinds also a hub name.
    vocabulary, text_encoder: the sources of yolo-world's phrase vectors, a vocabulary file and a folder with CLIP for
    all other phrases; by default vocabulary.safetensors beside the weights.
    image_size: side of yolo-world's input in pixels; 0 selects the size of its training.
    text_score: score that each token of a phrase must exceed, of grounding-dino only.
    tracker: the model whose encoder sam3-concept shares, if both have the same weights.
    See `load_tracker` for `device` and `dtype`. Raises ModelError or VocabularyError if the files cannot be used.
    """
    name = os.fspath(name_or_path)
    if text_score and kind != "grounding-dino":
        raise ModelError(
            f"detector.text_score: expected 0 for {kind}, which scores no words, found {text_score}; only "
            "grounding-dino takes it"
        )
    if kind == "yolo-world":
        return _load_yolo_world(name, vocabulary, text_encoder, image_size, device=device, dtype=dtype)
    if kind not in ("sam3-concept", "grounding-dino"):
        raise ModelError(
            f"expected a detector yolo-world, sam3-concept or grounding-dino, found {kind!r:.60}"
            f"{did_you_mean(kind, KINDS)}"
        )
    # an option that does nothing is a mistake of the profile, and would be noticed late
    if vocabulary is not None or text_encoder is not None:
        raise VocabularyError(
            f"expected a vocabulary or text encoder for yolo-world only, found one for {kind}, which encodes phrases "
            "itself; leave detector.vocabulary and detector.text_encoder empty"
        )
    if name == "nano":
        raise ModelError(
            f"expected a folder or a hub name for {kind}, found nano, which is a yolo-world (detector.name)"
        )
    if kind == "sam3-concept":
        from .sam3_concept import load_sam3_concept

        return load_sam3_concept(name, device=device, dtype=dtype, tracker=tracker)
    from .grounding_dino import load_grounding_dino

    return load_grounding_dino(name, device=device, dtype=dtype, text_score=text_score)


def load_vocabulary(settings: DetectorSettings) -> Vocabulary | None:
    """Load the phrases that a detector with these settings is limited to; None if it takes any phrase.

    Raises VocabularyError if the file cannot be read.
    """
    if settings.kind != "yolo-world" or settings.text_encoder is not None:
        return None
    folder = NANO if settings.name == "nano" else Path(settings.name)
    return Vocabulary.load(settings.vocabulary or folder / VOCABULARY)


def _load_yolo_world(
    name: str, vocabulary: File | None, text_encoder: File | None, image_size: int, **device: Any
) -> Detector:
    from ..models.yolo.network import load_yolo_world
    from .yolo_world import YoloWorldDetector

    is_nano = name == "nano"
    folder = find_yolo_folder(name)
    model = load_yolo_world(folder, **device)
    return YoloWorldDetector(
        model,
        _phrase_encoder(folder, vocabulary, text_encoder),
        name="nano" if is_nano else folder.resolve().name,  # a folder such as . has no name of its own
        image_size=image_size or model.config.image_size,
    )


def find_yolo_folder(name: str) -> Path:
    """Return the folder of yolo-world's weights. Raises ModelError if there is none."""
    folder = NANO if name == "nano" else Path(name)
    if not folder.is_dir():
        raise ModelError(
            f"no folder {folder}: expected nano (bundled), or a folder that `sam3-node weights convert` wrote "
            f"(detector.name){did_you_mean(name, ['nano', *map(str, folder.parent.glob('*/'))])}"
        )
    return folder


def _phrase_encoder(folder: Path, vocabulary: File | None, text_encoder: File | None) -> PhraseEncoder:
    # without settings, the vocabulary that came with the weights
    if vocabulary is None and text_encoder is None:
        vocabulary = folder / VOCABULARY
        if not vocabulary.is_file():
            raise VocabularyError(
                f"expected {vocabulary}, or the setting of a vocabulary or text encoder, found none; set "
                "detector.vocabulary to a file that `sam3-node vocabulary build` wrote, or "
                "detector.text_encoder to a folder with CLIP"
            )
    table = Vocabulary.load(vocabulary) if vocabulary is not None else None
    if text_encoder is None:
        assert table is not None
        return table
    # imported only now: it needs transformers, which a node with a vocabulary can do without
    from .clip_text import ClipText

    encoder = ClipText(text_encoder)
    if table is None:
        return encoder
    return VocabularyWithFallback(table, encoder)

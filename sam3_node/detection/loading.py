"""Load a detector of any kind. The modules of a kind are imported only when it is loaded."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, VocabularyError, did_you_mean, require_installed
from ..files import describe_stand_in
from ..settings import DETECTOR_KINDS
from .detectors import NANO, VOCABULARY, Detector, File
from .phrases import PhraseEncoder
from .vocabulary import Vocabulary, VocabularyWithFallback

if TYPE_CHECKING:
    import torch

    from ..models import TrackerModel
    from ..settings import DetectorSettings

KINDS = tuple(kind for kind in DETECTOR_KINDS if kind != "none")
"""Kinds that `load_detector` knows without other packages."""
GROUP = "sam3_node.detectors"
"""Entry point group under which installed packages offer detectors, by their kinds."""


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
    """Load a detector of a kind in KINDS, or of one that an installed package offers.

    name_or_path: "nano" (the bundled yolo-world) or a folder of weights; for sam3-concept and grounding-dino also a hub
    name, for onnx a file. Another package's detector gets this text.
    vocabulary, text_encoder: the sources of yolo-world's phrase vectors, a vocabulary file and a folder with CLIP for
    all other phrases; by default vocabulary.safetensors beside the weights.
    image_size: side of yolo-world's input in pixels; 0 selects the size of its training.
    text_score: score that each token of a phrase must exceed, of grounding-dino only.
    tracker: the model whose encoder sam3-concept shares, if both have the same weights.
    See `load_tracker` for `device` and `dtype`. Raises ModelError or VocabularyError if the files cannot be used,
    MissingExtraError for onnx without its extra.
    """
    name = os.fspath(name_or_path)
    if text_score and kind != "grounding-dino":
        raise ModelError(
            f"detector.text_score: expected 0 for {kind}, which scores no words, found {text_score}; only "
            "grounding-dino takes it"
        )
    if kind == "yolo-world":
        return _load_yolo_world(name, vocabulary, text_encoder, image_size, device=device, dtype=dtype)
    check_chosen(kind, name)
    # an option that does nothing is a mistake of the profile, and would be noticed late
    if vocabulary is not None or text_encoder is not None:
        raise VocabularyError(
            f"expected a vocabulary or text encoder for yolo-world only, found one for {kind}, which reads phrases "
            "itself; leave detector.vocabulary and detector.text_encoder empty"
        )
    if kind not in KINDS:
        from .guarded import load_installed

        return load_installed(find_installed()[kind], name, str(device))
    if kind == "onnx":
        from .onnx_detector import load_onnx

        return load_onnx(Path(name), device=device)
    if name == "nano":
        raise ModelError(
            f"expected a folder or a hub name for {kind}, found nano, which is a yolo-world (detector.name)"
        )
    if kind == "sam3-concept":
        from .sam3_concept import load_sam3_concept

        return load_sam3_concept(name, device=device, dtype=dtype, tracker=tracker)
    from .grounding_dino import load_grounding_dino

    return load_grounding_dino(name, device=device, dtype=dtype, text_score=text_score)


def find_installed() -> dict[str, metadata.EntryPoint]:
    """Return the detectors that installed packages offer, by kind."""
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def check_chosen(kind: str, name: str) -> None:
    """Raise ModelError for a kind that nobody offers, and for an ONNX file that is not there. Loads nothing.

    Raises MissingExtraError for onnx without its extra.
    """
    if kind not in DETECTOR_KINDS and kind not in (installed := find_installed()):
        offered = ", ".join(installed) or "none"
        raise ModelError(
            f"detector.kind: expected one of {', '.join(KINDS)}, or one that an installed package offers (entry point "
            f"group {GROUP}: {offered}), found {kind!r:.60}{did_you_mean(kind, [*KINDS, *installed])}"
        )
    if kind != "onnx":
        return
    require_installed("onnxruntime", "onnxruntime")
    path = Path(name)
    if not path.is_file():
        raise ModelError(
            f"no file {path}: expected a detector that was exported to ONNX (detector.name)"
            f"{did_you_mean(name, map(str, path.parent.glob('*.onnx')))}"
        )
    if stand_in := describe_stand_in(path):
        raise ModelError(f"expected an ONNX file at {path}, found {stand_in}")


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

"""Say where a detector's weights lie, without loading them, and refuse what its kind cannot load."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from ..models.locating import locate_weights
from ..models.registry import find_family
from ..models.sam31.loading import find_local_checkpoint, read_tensors
from ..models.weight_files import is_cached, is_logged_in
from ..settings import DetectorSettings
from .loading import KINDS, check_chosen, find_installed, find_yolo_folder


def locate_detector(settings: DetectorSettings) -> str:
    """Say where the files of a detector lie. Raises ModelError where nothing can be loaded."""
    name = settings.name
    check_chosen(settings.kind, name)
    if settings.kind == "onnx":
        return f"{name}, {Path(name).stat().st_size / 1e6:.0f} MB"
    if settings.kind not in KINDS:
        return f"{settings.kind}, {find_installed()[settings.kind].value}, with {name}"
    if settings.kind == "yolo-world":
        find_yolo_folder(name)
        return locate_weights(name)
    family = find_family(name)
    if family is None:
        return locate_weights(name)
    if settings.kind != family.detector_kind:
        raise ModelError(
            f"{name} is {family.title}'s checkpoint: expected other weights for detector.kind {settings.kind}; take "
            f"--detector.kind {family.detector_kind or 'none'}"
        )
    return f"{locate_weights(name)}; {_locate_parts(name, find_local_checkpoint(name))}"


def _locate_parts(name: str, checkpoint: Path | None) -> str:
    """Say where the tokenizer is. Raises ModelError if a file lacks the detector, or if there is no tokenizer."""
    # here, because transformers' detectors take seconds to import
    from .sam3_concept import TOKENIZER, explain_tokenizer, has_tokenizer
    from .sam3_concept_weights import read_detector

    if checkpoint is not None:
        read_detector(read_tensors(checkpoint), name)
        if has_tokenizer(checkpoint.parent):
            return "its tokenizer beside it"
    if is_cached(TOKENIZER):
        return f"the tokenizer of {TOKENIZER}, in the cache of the hub"
    if not is_logged_in():
        if checkpoint is not None:
            raise explain_tokenizer(checkpoint, "nobody is logged in to the hub")
        raise ModelError(
            f"{name}: expected the tokenizer of {TOKENIZER} in the cache of the hub, found neither it nor a login; ask "
            "for access on its page, then: hf auth login"
        )
    return f"the tokenizer of {TOKENIZER}, not here yet: the first start fetches it from the hub"

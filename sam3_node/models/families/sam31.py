"""SAM 3.1, in Meta's checkpoint. Its objects share their memories in groups."""

from pathlib import Path

from ...gpu_memory import GROUPS
from ..family import Family, FileWeights, LoadOptions
from ..sam31.checkpoint import read_sizes
from ..sam31.loading import (
    SAM31,
    SAM31_FILE,
    STEM,
    find_checkpoint,
    find_local_checkpoint,
    load_sam31,
    read_tensors,
)
from ..sam31.model import Sam31Model


def _load(name: str, path: Path, options: LoadOptions) -> Sam31Model:
    return load_sam31(name, path, **options._asdict())


def _describe(name: str, path: Path) -> str:
    """See `FileWeights`. The values of the tensors stay in the file."""
    sizes = read_sizes(read_tensors(path), name)
    return f"SAM 3.1 at {sizes.image_size} px in groups of {sizes.slots} objects"


FAMILY = Family(
    "SAM 3.1",
    FileWeights(
        find_local_checkpoint,
        find_checkpoint,
        _load,
        _describe,
        hub_file=SAM31_FILE,
        hint=f"SAM 3.1's {STEM}.safetensors or .pt",
    ),
    hub_name=SAM31,
    is_gated=True,
    detector_kind="sam3-concept",
    gpu_memory=GROUPS,
)

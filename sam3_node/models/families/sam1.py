"""SAM 1 (arXiv 2304.02643), for single images, in transformers' layout."""

from typing import Any

from ..family import Family, Reading, TransformersWeights
from ..sam.encoder import adapt_sam1
from ..sam.tracker_model import TrackerModel


def _read(name: str, configure: Any) -> Reading:
    from transformers import SamModel

    from ..pretrained import load_pretrained

    return Reading(*load_pretrained(name, {"sam": SamModel}, configure=configure))


def _build(source: Any, **options: Any) -> TrackerModel:
    return TrackerModel(adapt_sam1(source), **options)


FAMILY = Family(
    "SAM 1",
    TransformersWeights(("sam",), _read, None, None, build=_build, has_memory=False),
)

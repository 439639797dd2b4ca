"""SAM 1 (arXiv 2304.02643), for single images, in transformers' layout."""

from functools import partial
from typing import Any

from ..family import Family, TransformersWeights
from ..sam.configuration import Sam1Config
from ..sam.encoder import adapt_sam1
from ..sam.tracker_model import TrackerModel
from ..tracker_reader import read_tracker


def _build(source: Any, **options: Any) -> TrackerModel:
    return TrackerModel(adapt_sam1(source), **options)


FAMILY = Family(
    "SAM 1",
    TransformersWeights(
        ("sam",), partial(read_tracker, Sam1Config), None, None, build=_build, has_memory=False
    ),
)

"""Define the interface of detectors, and prepare the prompts that a detector searches for.

A detector prepares phrases once, and then returns boxes for each frame. `loading` makes one of any kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from msgspec import Meta

from ..errors import ModelError, RequestError, summarize_error
from ..schema.fields import Share
from ..schema.state import Id, Label, Number, Tensor
from ..types import Detection, Image, Priority
from .phrases import clean_phrase, clean_prompts, phrase_key

NANO = Path(__file__).parents[1] / "models" / "nano_detector"
"""Folder of the bundled detector."""
VOCABULARY = "vocabulary.safetensors"
"""Name of the vocabulary beside the weights of a detector."""
MAX_IOU = 0.7
"""IoU of two boxes of one phrase above which only the better one is kept, as with the public weights."""
MAX_DETECTIONS = 100
"""Boxes that a detector returns for a frame, the best of all phrases."""
MAX_BOXES = 64
"""Boxes of one exemplar, on all images together."""
MAX_ALL_BOXES = 1024
"""Boxes of all exemplars together. More are refused, because the detector keeps 1 or 2 KB of tokens for each."""

T = TypeVar("T")
File = str | os.PathLike[str]
Boxes = Sequence[Sequence[float]]
"""(x0, y0, x1, y1) of each, in pixels of an image"""


class Detector(Protocol):
    """Finds objects by name. It keeps no state between calls, so one detector serves all cameras."""

    @property
    def name(self) -> str:
        """Name of the model, for status and messages."""

    def prepare(self, phrases: Sequence[str]) -> Any:
        """Return a query for at least one phrase; the phrases are cleaned and unique. All cameras and frames share it.

        Raises RequestError, or UnknownPhraseError for a phrase without a vector; nothing is changed then.
        """

    def detect(
        self, image: Image, query: Any, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Return the detections on a BGR frame [h, w, 3] with a score above `threshold`, the best first.

        Only the best of overlapping boxes with the same phrase is returned. trunk: the features that the tracker's
        encoder computed for the frame, for a detector that shares the encoder; others ignore it. Raises ModelError if
        the model fails.
        """


class KnownNames(NamedTuple):
    """The names that a detector was made for."""

    names: Sequence[str]
    is_open: bool
    """True: it takes any other name as well"""


@runtime_checkable
class NamingDetector(Detector, Protocol):
    """A detector that can list names, in most cases because it refuses all others."""

    @property
    def known_names(self) -> KnownNames:
        """The names that it was made for. Raises ModelError if the model fails."""


class View(NamedTuple):
    """Boxes on one image: things that a prompt means, or does not mean."""

    boxes: Sequence[Sequence[Number]]
    """(x0, y0, x1, y1) of each, in pixels of the image"""
    labels: Sequence[Annotated[int, Meta(ge=0, le=1)]]
    """of each box: 1 for a thing that is meant, 0 for one that is not"""
    tokens: Tensor
    """[T, C]: the boxes as the detector encoded them on the image, on the CPU"""


class Exemplar(NamedTuple):
    """Boxes that show the meaning of a prompt: all like these."""

    text: Label
    """words beside the boxes; "" for none"""
    views: Mapping[Label, View]
    """by the name of the image"""

    @property
    def labels(self) -> list[int]:
        """The labels of all boxes."""
        labels: list[int] = []
        for view in self.views.values():
            labels.extend(view.labels)
        return labels


@runtime_checkable
class ExemplarDetector(Detector, Protocol):
    """A detector that also finds what boxes on an image show."""

    def prepare(self, phrases: Sequence[str], exemplars: Mapping[str, Exemplar] = ...) -> Any:
        """Return a query as `Detector.prepare` does; some of the phrases only name what their exemplar shows."""

    def encode_exemplar(self, image: Image, boxes: Boxes, labels: Sequence[int]) -> Tensor:
        """Return the tokens [T, C] of a View: boxes on a BGR image [h, w, 3]. Raises ModelError if the model fails."""


@dataclass(eq=False)
class PromptSet:
    """Prompts with their limits, the same for all cameras. Without phrases, nothing is searched for.

    A snapshot holds all but the query, which another detector prepares in another way.
    """

    thresholds: Mapping[Label, Share] = field(default_factory=dict)
    """minimum score of a new object, for each phrase"""
    max_counts: Mapping[Label, Id] = field(default_factory=dict)
    """maximum number of objects, for some phrases"""
    priorities: Mapping[Label, Priority] = field(default_factory=dict)
    """priority of the objects of some phrases; other objects have normal priority"""
    exemplars: Mapping[Label, Exemplar] = field(default_factory=dict)
    """what some phrases mean, shown by boxes"""
    query: Any = field(default=None, init=False)
    """prepared by the detector"""

    @property
    def phrases(self) -> tuple[str, ...]:
        """The phrases, in their order."""
        return tuple(self.thresholds)

    def prepare(self, detector: Detector | None) -> PromptSet:
        """Return these prompts with the detector's query. Raises RequestError if it cannot search for them."""
        if detector is None:
            raise RequestError("set_prompts: no detector is configured; set detector.kind, or use add_object")
        if not self.phrases:
            return self
        prepared = replace(self)
        # exemplars need a detector that takes boxes; names alone need none
        if self.exemplars:
            prepared.query = require_exemplars(detector).prepare(self.phrases, self.exemplars)
        else:
            prepared.query = detector.prepare(self.phrases)
        return prepared


def find_known_names(detector: Detector | None) -> KnownNames:
    """Return the names that a detector knows: none and no others without a detector; any if it does not list them."""
    if isinstance(detector, NamingDetector):
        return detector.known_names
    return KnownNames((), detector is not None)


def prepare_prompts(
    detector: Detector | None,
    phrases: Sequence[str],
    score: float,
    scores: Mapping[str, float] | None = None,
    max_counts: Mapping[str, int] | None = None,
    priorities: Mapping[str, Priority] | None = None,
    exemplars: Mapping[str, Exemplar] | None = None,
) -> PromptSet:
    """Prepare cleaned, unique phrases for a detector.

    scores: thresholds of some phrases; `score` is the threshold of the others. max_counts: maximum numbers of objects
    of some phrases. priorities: priorities of some phrases. exemplars: what some phrases mean; those of other phrases
    are dropped. Raises RequestError for a phrase that the detector cannot search for, and for a limit whose phrase is
    not among `phrases`.
    """
    # exemplars of names that are not looked for any more are forgotten; limits of such names are a mistake
    keys = set(map(phrase_key, phrases))
    kept = {name: shown for name, shown in (exemplars or {}).items() if phrase_key(name) in keys}
    scores = _by_phrase(scores or {}, phrases)
    prompts = PromptSet(
        thresholds={phrase: scores.get(phrase, score) for phrase in phrases},
        max_counts=_by_phrase(max_counts or {}, phrases),
        priorities=_by_phrase(priorities or {}, phrases),
        exemplars=_by_phrase(kept, phrases),
    )
    return prompts.prepare(detector)


def add_exemplar(
    detector: Detector | None,
    prompts: PromptSet,
    name: str,
    image: Image,
    *,
    place: str,
    boxes: Boxes,
    labels: Sequence[int],
    text: str,
    score: float,
) -> PromptSet:
    """Return the prompts with what boxes on a BGR image [h, w, 3] show, under this name.

    place: names the image; its boxes are encoded together with its earlier ones. text: words in addition to the boxes;
    by default the name if it is among the prompts, else none. score: the threshold of a new name. See View. Raises
    RequestError for a name or text that the detector cannot search for, for more than MAX_BOXES boxes of a name or
    MAX_ALL_BOXES of all, and where nothing says what is meant.
    """
    # the name in the spelling that it has among the prompts, and what it has meant so far
    (name,) = _by_phrase({clean_phrase(name): None}, clean_prompts([*prompts.phrases, name]))
    before = prompts.exemplars.get(name)
    if before is None:
        before = Exemplar(name if name in prompts.thresholds else "", {})
    if not 0 < len(boxes) <= MAX_BOXES - len(before.labels):
        found = len(before.labels) + len(boxes)
        raise RequestError(f"boxes: expected 1 to {MAX_BOXES} of one name, found {found}")
    total = len(boxes) + sum(len(shown.labels) for shown in prompts.exemplars.values())
    if total > MAX_ALL_BOXES:
        raise RequestError(
            f"boxes: expected at most {MAX_ALL_BOXES} of all names together, found {total}; set_prompts forgets the "
            "names that it does not repeat"
        )
    # boxes of one image are encoded together, so its earlier ones are encoded again
    if place in before.views:
        boxes = [*before.views[place].boxes, *boxes]
        labels = [*before.views[place].labels, *labels]
    tokens = require_exemplars(detector).encode_exemplar(image, boxes, labels)
    views = {**before.views, place: View(boxes, labels, tokens)}
    words = clean_phrase(text, "text") if text else before.text
    exemplar = Exemplar(words, views)
    if not (exemplar.text or any(exemplar.labels)):
        raise RequestError("labels: expected a box of label 1, or a text, to say what is meant; found only 0")
    thresholds = {**prompts.thresholds, name: prompts.thresholds.get(name, score)}
    exemplars = {**prompts.exemplars, name: exemplar}
    return replace(prompts, thresholds=thresholds, exemplars=exemplars).prepare(detector)


def require_exemplars(detector: Detector | None) -> ExemplarDetector:
    """Return the detector. Raises RequestError for one that finds objects by name only, and for none."""
    # known by its methods, which a detector that finds names only does not have
    if isinstance(detector, ExemplarDetector):
        return detector
    found = "none"
    if detector is not None:
        found = f"{detector.name}, whose weights have no encoder of image prompts"
    raise RequestError(
        f"exemplar: expected a detector that takes boxes as prompts (detector.kind sam3-concept), found {found}; "
        "look for a name, or add each object with add_object"
    )


def _by_phrase(limits: Mapping[str, T], phrases: Sequence[str]) -> dict[str, T]:
    """Return the limits with the spelling of their keys in `phrases`."""
    spelling = {phrase_key(phrase): phrase for phrase in phrases}
    if unknown := [name for name in limits if phrase_key(name) not in spelling]:
        raise RequestError(
            f"expected limits for the prompts {', '.join(phrases)}, found one for {unknown[0]!r:.60}"
        )
    return {spelling[phrase_key(name)]: limit for name, limit in limits.items()}


@contextmanager
def raise_model_error(name: str) -> Iterator[None]:
    """Raise ModelError if torch fails in the block, for example because memory runs out."""
    try:
        yield
    except RuntimeError as error:
        raise ModelError(f"{name} failed: {summarize_error(error)}") from error

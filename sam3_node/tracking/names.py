"""Confidence of names: the probability that an object is what its label says, from the detections that named it.

A detector gives things that it does not know the name that was asked for. The probability is a logistic function of the
features below, averaged over the detections of a track. It depends only on the detections since the object came into
view. `confidence_weights` holds the weights for the bundled detector, which `python -m training.doubt.names` fits; a
file of `sam3-node calibrate names` holds those for another one.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta, field

from ..errors import ModelError, WireError
from ..files import read_json
from ..models.pixels import box_iou
from ..schema.fields import Finite, NotNegative, Text, convert
from ..schema.state import Count, Number, SavedState
from ..types import Detection
from .confidence_weights import NAME_BIAS, NAME_WEIGHTS, NAMES_CALIBRATED_FOR, USUAL_MARGINS

FEATURES = ("score", "rival", "other", "look", "thing", "agreement")
"""Logit of the detection's score; its margin to the best detection of the same phrase elsewhere, and to the best of
another phrase in the same place; its margins to phrases of another look and of another thing (`Detection.margins`);
and the share of the rounds in view in which a detection gave the object this name."""
MEASURED = len(FEATURES) - 1
"""Features that a detection has: all but the agreement."""
SAME_PLACE = 0.5
"""IoU above which two boxes are of the same thing, so that another name there is a competing name."""
ELSEWHERE = 0.3
"""IoU below which two boxes are of different things, so that the same name there is a competing object."""
LOWEST = -2.2
"""Logit of the score that is taken for a competing detection where the detector found none."""
MAX_MARGIN = 4.0  # bound of margins, in logits
MEMORY = 10  # detections after which older ones fade
MAX_FILE_BYTES = 1 << 20
"""Size of a file of a calibration."""


Feature = Literal["score", "rival", "other", "look", "thing", "agreement"]


class NameCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """The logistic function of the features that gives the probability that a name is right."""

    detectors: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """names of the weights of the detectors to whose detections it was fitted"""
    bias: Finite
    weights: dict[Feature, NotNegative]
    """by feature; one that is absent has weight 0"""

    def suits(self, detector_name: str) -> bool:
        """Return True if it was fitted to the detections of the detector with this name."""
        return detector_name in self.detectors

    def estimate(self, features: Sequence[float]) -> float:
        """Return the probability that a label with these features is right."""
        logit = self.bias + sum(
            self.weights.get(name, 0.0) * value  # type: ignore[call-overload]
            for name, value in zip(FEATURES, features, strict=True)
        )
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


BUNDLED = NameCalibration(detectors=NAMES_CALIBRATED_FOR, bias=NAME_BIAS, weights=NAME_WEIGHTS)  # type: ignore[arg-type]
"""Of the bundled detector"""


def load_name_calibration(path: Path | None) -> NameCalibration:
    """Read a file of `sam3-node calibrate names`; without a path, return that of the bundled detector.

    Raises ModelError for another file.
    """
    if path is None:
        return BUNDLED
    expected = "a file of sam3-node calibrate names"
    try:
        return convert(read_json(path, MAX_FILE_BYTES, ModelError, expected), NameCalibration, str(path))
    except FileNotFoundError as error:
        raise ModelError(f"expected {expected} at {path}, found no file") from error
    except WireError as error:
        raise ModelError(str(error)) from error


class NameEvidence(SavedState):
    """Evidence of the detections of one object for one label."""

    means: Annotated[list[Number], Meta(min_length=MEASURED, max_length=MEASURED)] = field(
        default_factory=lambda: [0.0] * MEASURED
    )
    """of the features, without the agreement; the last MEMORY detections count most"""
    count: Count = 0
    """number of detections"""

    def add(self, features: Sequence[float]) -> None:
        """Add the features of a detection."""
        self.count += 1
        share = 1 / min(self.count, MEMORY)
        self.means = [mean + share * (new - mean) for mean, new in zip(self.means, features, strict=True)]


def measure_names(detections: Sequence[Detection], with_margins: bool) -> list[list[float]]:
    """Return the features of each of the detections of one frame, without the agreement.

    Without margins, the usual margins take the place of `Detection.margins`.
    """
    logits = [_logit(each.score) for each in detections]
    boxes = torch.tensor([each.box for each in detections], dtype=torch.float64).reshape(-1, 4)
    ious = box_iou(boxes, boxes).tolist()
    found = []
    for index, each in enumerate(detections):
        rival = other = LOWEST
        for at, against in enumerate(detections):
            if at == index:
                continue
            iou = ious[index][at]
            if against.label == each.label and iou < ELSEWHERE:
                rival = max(rival, logits[at])
            elif against.label != each.label and iou > SAME_PLACE:
                other = max(other, logits[at])
        own = logits[index]
        margins = each.margins if with_margins else (None, None)
        usual = [
            usual if value is None else value
            for usual, value in zip(USUAL_MARGINS.values(), margins, strict=True)
        ]
        found.append([own, *(_bound(value) for value in (own - rival, own - other, *usual))])
    return found


def list_features(evidence: NameEvidence, rounds: int) -> list[float]:
    """Return the features of a label in the order of FEATURES; the object was in view in `rounds` of the detector."""
    return [*evidence.means, min(1.0, evidence.count / max(1, rounds))]


def _logit(score: float) -> float:
    score = max(1e-3, min(1 - 1e-3, score))
    return math.log(score / (1 - score))


def _bound(margin: float) -> float:
    return max(-MAX_MARGIN, min(MAX_MARGIN, margin))

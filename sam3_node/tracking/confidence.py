"""Confidence of tracked masks: the probability that a mask is right, from the decoder and from the track's history.

A mask is right if its IoU with the true mask is at least 0.5. The probability is a logistic function of the features
below; `confidence_weights` holds the weights, which `python -m training.doubt.fit` fits. Everything runs on the host in
numpy, for all objects at once. The results depend only on the frames and prompts since the objects were added.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..schema.state import Count, SavedState, Time
from .confidence_weights import JUMPED, MASK_BIAS, MASK_WEIGHTS, MASKS_CALIBRATED_FOR
from .saved_tables import SavedTables
from .track_history import Bools, Departure, Floats, LevelSets, MaskSignals, TrackHistory, grid_side, measure

Floats32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

LEARN = 0.9
"""Confidence from which a mask is added to its track's history."""
JUMP_AREA = 1.1
"""Change of the log area against the history that counts as a jump: a factor of 3."""
MAX_LOG = 3.0
"""Bound of features that are logarithms of ratios."""
MAX_EVIDENCE = 6.0
"""Bound of a frame's evidence before it enters the running mean."""
CARRY = 0.8
"""Weight of the earlier frames in the running mean of the evidence."""

CALIBRATION = hashlib.sha256(repr((MASK_BIAS, JUMPED, sorted(MASK_WEIGHTS.items()))).encode()).hexdigest()[
    :16
]
"""Identity of the weights. A saved state fits only the same weights."""

OWN = ("score", "presence", "stability", "overlap", "appearance")
"""Features of the mask itself."""
DEPARTURES = ("area", "growth", "previous", "shape")
"""Features that compare the mask with the track's history; 0 where it agrees. See `Departure`."""
FEATURES = (*OWN, *DEPARTURES, "carried")
"""All features. The last is the running mean of the evidence of the frames before."""


def is_calibrated(model_name: str) -> bool:
    """Return True if the weights were fitted to the masks of the model with this name."""
    return model_name in MASKS_CALIBRATED_FOR


class Evidence(NamedTuple):
    """Tracks of N objects on one frame, as far as the estimate uses them."""

    ids: Sequence[int]
    levels: LevelSets
    scores: Sequence[float]
    """N values in 0..1"""
    visible: Sequence[bool]
    """N values"""
    presence: Floats32
    """[N], logits"""
    pointers: Floats32
    """[N, C], object pointers"""


class ConfidenceState(SavedState):
    """What `ConfidenceEstimator` keeps: the row of each object, free rows, and the tables of the rows in use."""

    rows: dict[Time, Count]
    free: list[Count]
    history: dict[str, torch.Tensor]
    pointers: torch.Tensor
    carried: torch.Tensor


class ConfidenceEstimator(SavedTables):
    """Estimates the confidence of the masks of one camera's objects, frame by frame.

    Memory for `capacity` objects with logits of `side` x `side` and pointers of `channels` is allocated at once.
    """

    STATE = ConfidenceState

    def __init__(self, capacity: int, side: int, channels: int) -> None:
        self._weights: Floats = np.array([MASK_WEIGHTS.get(name, 0.0) for name in FEATURES])
        self._bias = MASK_BIAS
        self._jumped = JUMPED
        self._rows: dict[int, int] = {}
        self._free = list(range(capacity))
        self._history = TrackHistory(capacity, (grid_side(side),) * 2)
        # of length 1, or 0 while unknown
        self._pointers: Floats32 = np.zeros((capacity, channels), np.float32)
        self._carried: Floats = np.zeros(capacity)

    def start(self, object_id: int, levels: LevelSets) -> None:
        """Begin the history of an object again with the one mask of `levels`, of a prompt or of a detection."""
        known = object_id in self._rows
        rows = np.array([self._rows[object_id] if known else self._add(object_id)], np.int64)
        self._history.start(rows, measure(levels, np.ones(1, np.bool_)))
        self._carried[rows] = MAX_EVIDENCE

    def rename(self, object_id: int, new_id: int) -> None:
        """Give the history of an object to another id, in the place of that id's own."""
        self.remove(new_id)
        self._rows[new_id] = self._rows.pop(object_id)

    def remove(self, object_id: int) -> None:
        """Forget an object, if it is known."""
        row = self._rows.pop(object_id, None)
        if row is not None:
            self._free.append(row)

    def observe(self, evidence: Evidence) -> list[float]:
        """Return the confidence of N masks on the next frame, each in 0..1.

        The first mask of an object that was not started begins its history. A mask that is not visible has
        confidence 0.
        """
        ids, levels, scores, visible, presence, pointers = evidence
        if not ids:
            return []
        shown = np.array(visible, np.bool_) & ~levels.is_empty
        signals = measure(levels, shown)
        new = np.array([object_id not in self._rows for object_id in ids])
        rows = np.array([self._rows[i] if i in self._rows else self._add(i) for i in ids], np.int64)
        if new.any():
            self._history.start(rows[new], signals.select(new))
            self._carried[rows[new]] = MAX_EVIDENCE
        unit = _normalise(_finite(pointers))
        # the first known pointer stands for the object's appearance
        unknown = ~self._pointers[rows].any(axis=1)
        self._pointers[rows[unknown]] = unit[unknown]
        departure = self._history.observe(rows, signals)
        features = self._features(rows, signals, departure, np.array(scores), presence, unit)
        jumped = (departure.jump > 0) | (departure.area > JUMP_AREA)
        return self._conclude(rows, signals, features, shown, jumped)

    def _conclude(
        self, rows: Ints, signals: MaskSignals, features: Floats, shown: Bools, jumped: Bools
    ) -> list[float]:
        """Return the confidence of the masks, and learn from them."""
        terms = features * self._weights
        evidence = self._bias + terms.sum(axis=1)
        confidence = np.where(shown, _sigmoid(evidence), 0.0)
        confidence = np.where(jumped, np.minimum(confidence, self._jumped), confidence)
        # without the last term, which is the carried evidence itself
        before = evidence - terms[:, -1]
        carried = CARRY * self._carried[rows] + (1 - CARRY) * np.clip(before, -MAX_EVIDENCE, MAX_EVIDENCE)
        self._carried[rows] = np.where(shown, carried, self._carried[rows])
        own = self._bias + terms[:, : len(OWN)].sum(axis=1)
        self._history.learn(rows, signals, shown, confidence >= LEARN, _sigmoid(own) >= LEARN)
        return [float(value) for value in confidence]

    def _features(
        self,
        rows: Ints,
        signals: MaskSignals,
        departure: Departure,
        scores: Floats,
        presence: Floats32,
        pointers: Floats32,
    ) -> Floats:
        """Return the features [N, F] in the order of FEATURES."""
        score = np.clip(scores.astype(np.float64), 0.01, 0.99)
        columns = [
            np.log(score / (1 - score)),
            np.clip(presence.astype(np.float64), -10, 10) / 10,
            signals.stability,
            signals.overlap,
            np.einsum("nc,nc->n", pointers, self._pointers[rows], dtype=np.float64),
            np.minimum(departure.area, MAX_LOG),
            np.minimum(departure.growth, MAX_LOG),
            departure.previous,
            departure.shape,
            self._carried[rows],
        ]
        return _finite(np.stack(columns, axis=1))

    def _add(self, object_id: int) -> int:
        row = self._rows[object_id] = self._free.pop(0)
        self._pointers[row] = 0
        return row

    @property
    def used(self) -> list[int]:
        """The rows of the objects."""
        return list(self._rows.values())

    def before_restore(self, state: ConfidenceState) -> None:
        """Raise ValueError if the rows do not fit this capacity."""
        capacity = len(self._carried)
        if sorted([*state.rows.values(), *state.free]) != list(range(capacity)):
            raise ValueError(f"expected each of {capacity} rows once, found {state.rows}, {state.free}")


def _finite(values: Any) -> Any:
    """Replace values that are not finite, if there are any."""
    return values if np.isfinite(values).all() else np.nan_to_num(values)


def _normalise(pointers: Floats32) -> Floats32:
    length = np.sqrt(np.einsum("nc,nc->n", pointers, pointers))
    return (pointers / np.maximum(length, 1e-6)[:, None]).astype(np.float32)


def _sigmoid(values: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))

"""Fit how sure the names of a detector are, on recordings of which a user says what they show and what they do not.

The recordings are played with the names of things that are there, with names of things that are not, with both, and
with single absent names. Masks with a name of a thing that is there count as right, all others as wrong: no mask needs
a label. Names on the wrong one of two things that are both there are not noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..bags import open_bag
from ..detection.detectors import Detector, prepare_prompts
from ..errors import RequestError
from ..models import TrackerModel
from ..perception.pipeline import Pipeline
from ..settings import DetectorSettings, TrackerSettings
from ..tracking.logistic import fit_logistic
from ..tracking.names import BUNDLED, FEATURES, NameCalibration
from ..types import Frame

COLOURS = ("red", "green", "blue", "yellow", "orange", "white", "black", "pink")
KINDS = ("mug", "bottle", "box", "ball", "can", "bowl", "spoon", "banana")
"""Words of the names that are taken for absent ones."""
MOST_ABSENT = 8
"""Names that are chosen for absent ones."""
ORDER = ((True, True), (True, False), (True, True), (False, True), (True, False), (False, False))
"""What these share with things that are there, a colour and a kind, in turn. A shared colour is the harder case."""
SINGLE = 3
"""Absent names that are also asked for alone, which is the hardest case."""
RIDGE = 1e-3
"""Penalty on squared weights of scaled features."""
FOLDS = 4
"""Parts of the names on which weights are judged that were fitted to the others."""

Floats = npt.NDArray[np.float64]


class NamedMask(NamedTuple):
    """A sure mask with a name."""

    name: str
    track: tuple[int, str, int]
    """the run, the camera, and the id of the object in it"""
    features: list[float]


class SureShares(msgspec.Struct, frozen=True):
    """Shares of the masks with a name that stay sure."""

    present: float
    """of those with the name of a thing that is there"""
    absent: float
    """of those with the name of a thing that is not"""


class NameReport(msgspec.Struct, frozen=True):
    """What the fitted confidence does."""

    present: int
    """masks with the name of a thing that is there"""
    absent: int
    """masks with the name of a thing that is not"""
    before: SureShares
    """without the fit"""
    after: SureShares
    judged_apart: bool
    """True if each name was judged by a fit to others. A single name of a kind is judged by its own fit."""


def choose_absent(present: Sequence[str], knows: Callable[[str], bool]) -> list[str]:
    """Return up to MOST_ABSENT names of things that none of `present` can mean.

    First come a colour and a kind that are there, but not together; then a colour or a kind that is there; then others.
    """
    colours = {name.split()[0] for name in present} & {*COLOURS}
    kinds = {name.split()[-1] for name in present}
    bare = {name.split()[-1] for name in present if name.split()[0] not in COLOURS}  # of any colour
    groups: dict[tuple[bool, bool], list[str]] = {like: [] for like in ORDER}
    for shift in range(len(COLOURS)):
        # other words in each turn, not one colour with all kinds
        for index, kind in enumerate(sorted({*KINDS, *kinds} - bare)):
            colour = COLOURS[(index + shift) % len(COLOURS)]
            name = f"{colour} {kind}"
            if name not in present and knows(name):
                groups[colour in colours, kind in kinds].append(name)
    found: list[str] = []
    for turn in range(MOST_ABSENT * len(ORDER)):
        group = groups[ORDER[turn % len(ORDER)]]
        if group and len(found) < MOST_ABSENT:
            found.append(group.pop(0))
    return found


def choose_runs(present: Sequence[str], absent: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the sets of names that are asked for, one after the other."""
    sets = [tuple(present), tuple(absent), (*present, *absent), *((name,) for name in absent[:SINGLE])]
    return list(dict.fromkeys(sets))


def knows(detector: Detector, name: str) -> bool:
    """Return True if the detector can look for this name."""
    try:
        detector.prepare([name])
    except RequestError:
        return False
    return True


def record_names(
    paths: Sequence[Path],
    model: TrackerModel,
    detector: Detector,
    settings: tuple[TrackerSettings, DetectorSettings],
    runs: Sequence[Sequence[str]],
    step: int,
) -> Iterator[list[NamedMask]]:
    """Play each recording with each set of names, every `step`-th frame; yield what each played frame shows."""
    tracker, detection = settings
    # as if it were calibrated already, so that margins are measured where the detector gives them
    names = NameCalibration(detectors=(detector.name,), bias=0.0, weights={})
    for run, (path, asked) in enumerate((path, asked) for path in paths for asked in runs):
        pipelines: dict[str, Pipeline] = {}
        counts: dict[str, int] = {}
        with open_bag(path) as bag:
            for frame in bag:
                camera = frame.camera
                counts[camera] = counts.get(camera, -1) + 1
                if counts[camera] % step:
                    continue
                if camera not in pipelines:
                    pipelines[camera] = Pipeline(model, tracker, camera, detector, detection, names=names)
                    pipelines[camera].set_prompts(prepare_prompts(detector, asked, detection.score))
                yield _list_named(pipelines[camera], frame, run, tracker.min_confidence)


def _list_named(pipeline: Pipeline, frame: Frame, run: int, min_confidence: float) -> list[NamedMask]:
    found = []
    for instance in pipeline.step(frame).instances:
        features = pipeline.name_features(instance.id)
        is_sure = (instance.confidence or 0.0) >= min_confidence
        if features and is_sure and instance.state == "tracked":
            track = (run, pipeline.camera, instance.id)
            found.append(NamedMask(instance.label, track, features))
    return found


def fit_names(
    masks: Sequence[NamedMask], present: Sequence[str], detector_name: str, sure: float
) -> tuple[NameCalibration, NameReport]:
    """Fit the confidence to masks, and judge it at `sure` on names that were left out.

    A track counts as much as another, and right names together as much as wrong ones. Raises RequestError unless there
    are both.
    """
    right = np.array([mask.name in present for mask in masks], np.bool_)
    if not right.any():
        raise RequestError(
            "expected sure masks with the names of things that are there, found none: the detector finds none of them"
        )
    if right.all():
        raise RequestError(
            "expected some sure masks with absent names, found none: this detector gives these names to nothing, and "
            "needs no calibration for them; name others by --absent"
        )
    x = np.array([mask.features for mask in masks], np.float64)
    share = _weigh(masks, right)
    calibration = _fit(x, right, share, detector_name)
    names = sorted({mask.name for mask in masks if mask.name in present})
    others = sorted({mask.name for mask in masks if mask.name not in present})
    judged_apart = min(len(names), len(others)) > 1
    confidence = np.array([calibration.estimate(row) for row in x.tolist()])
    if judged_apart:
        fold_of = {name: index % FOLDS for group in (names, others) for index, name in enumerate(group)}
        folds = np.array([fold_of[mask.name] for mask in masks])
        for fold in set(fold_of.values()):
            held = folds == fold
            judge = _fit(x[~held], right[~held], share[~held], detector_name)
            confidence[held] = [judge.estimate(row) for row in x[held].tolist()]
    before = np.array([BUNDLED.estimate(row) for row in x.tolist()])
    if not BUNDLED.suits(detector_name):
        before[:] = 1.0
    report = NameReport(
        present=int(right.sum()),
        absent=int((~right).sum()),
        before=_count_sure(before, right, sure),
        after=_count_sure(confidence, right, sure),
        judged_apart=judged_apart,
    )
    return calibration, report


def _count_sure(confidence: Floats, right: npt.NDArray[np.bool_], sure: float) -> SureShares:
    shares = [round(float((confidence[group] >= sure).mean()), 3) for group in (right, ~right)]
    return SureShares(*shares)


def _weigh(masks: Sequence[NamedMask], right: npt.NDArray[np.bool_]) -> Floats:
    """Return what each mask counts: the same sum for each track, and for right and wrong names."""
    tracks = [(*mask.track, mask.name) for mask in masks]
    counts = Counter(tracks)
    share = np.array([1.0 / counts[track] for track in tracks])
    for group in (right, ~right):
        share[group] /= 2 * share[group].sum()
    return share


def _fit(x: Floats, right: npt.NDArray[np.bool_], share: Floats, detector_name: str) -> NameCalibration:
    scale = x.std(axis=0)
    # what does not vary tells nothing, such as margins that a detector does not give
    scale[scale < 1e-6] = np.inf
    scaled = x / scale
    weights, bias = fit_logistic(scaled, right.astype(np.float64), share, np.zeros(x.shape[1]), RIDGE)
    found = {
        name: round(float(weight), 4)
        for name, weight in zip(FEATURES, weights / scale, strict=True)
        if weight > 1e-4
    }
    return NameCalibration(detectors=(detector_name,), bias=round(bias, 4), weights=found)  # type: ignore[arg-type]

"""Format the results of an evaluation as a table and as JSON.

Means are over the objects of a sequence or of all sequences, as in the benchmark.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .evaluate import SequenceResult
from .metrics import MaskScore, OcclusionCount

Results = Mapping[str, Mapping[str, SequenceResult]]
"""Results by setting, then by sequence."""

NONE = "-"


def as_json(results: Results) -> dict[str, Any]:
    """Return the figures of the first setting; where there are several, all are under `settings`."""
    reports = all_settings(results)
    first = next(iter(reports.values()))
    return first | {"settings": reports} if len(reports) > 1 else first


def all_settings(results: Results) -> dict[str, dict[str, Any]]:
    """Return the figures of each setting by its name."""
    return {name: _setting_json(sequences) for name, sequences in results.items()}


def _setting_json(sequences: Mapping[str, SequenceResult]) -> dict[str, Any]:
    return {
        **_score_json(mean_score(sequences.values())),
        "sequences": {name: _sequence_json(result) for name, result in sequences.items()},
        "occlusions": _occlusion_json(total_occlusions(sequences.values())),
        "frame_ms": frame_ms(sequences.values()),
    }


def _sequence_json(result: SequenceResult) -> dict[str, Any]:
    objects = {str(object_id): _score_json(score) for object_id, score in result.scores.items()}
    return _score_json(mean_score([result])) | {"objects": objects}


def _score_json(score: MaskScore | None) -> dict[str, float | None]:
    if score is None:
        return {"J": None, "F": None, "J&F": None}
    return {"J": score.j, "F": score.f, "J&F": (score.j + score.f) / 2}


def _occlusion_json(occlusions: OcclusionCount) -> dict[str, float | None]:
    return {
        "cases": occlusions.cases,
        "recovered": occlusions.recovered_share,
        "hidden_frames": occlusions.hidden_frames,
        "false_while_hidden": occlusions.false_while_hidden,
    }


def mean_score(results: Iterable[SequenceResult]) -> MaskScore | None:
    """Return J and F over all objects; None if there are no objects."""
    scores = [score for result in results for score in result.scores.values()]
    return MaskScore(*np.mean(scores, axis=0).tolist()) if scores else None


def total_occlusions(results: Iterable[SequenceResult]) -> OcclusionCount:
    return sum((result.occlusions for result in results), OcclusionCount())


def frame_ms(results: Iterable[SequenceResult]) -> float:
    """Return the milliseconds of a frame: the median over the sequences."""
    return statistics.median(result.frame_ms for result in results)


def as_table(results: Results) -> str:
    """Return a table: each sequence under each setting, then the means and their difference from the first."""
    rows: list[tuple[str, ...]] = [("sequence", "setting", "objects", "J", "F", "J&F", "ms/frame")]
    for sequence in next(iter(results.values())):
        for position, (setting, sequences) in enumerate(results.items()):
            result = sequences[sequence]
            name = "" if position else sequence
            cells = (str(len(result.scores)), *_score_cells(mean_score([result])))
            rows.append((name, setting, *cells, f"{result.frame_ms:.1f}"))
    return "\n".join((*_aligned(rows, left=2), "", *_aligned(_mean_rows(results), left=1)))


def _mean_rows(results: Results) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("mean", "J", "F", "J&F", "delta J", "recovered", "occlusions", "false while hidden", "ms/frame")
    ]
    base = mean_score(next(iter(results.values())).values())
    for setting, sequences in results.items():
        mean = mean_score(sequences.values())
        hidden = total_occlusions(sequences.values())
        change = f"{mean.j - base.j:+.3f}" if mean and base else NONE
        found = (_share(hidden.recovered_share), str(hidden.cases), _share(hidden.false_while_hidden))
        rows.append((setting, *_score_cells(mean), change, *found, f"{frame_ms(sequences.values()):.1f}"))
    return rows


def _score_cells(score: MaskScore | None) -> tuple[str, str, str]:
    if score is None:
        return NONE, NONE, NONE
    return f"{score.j:.3f}", f"{score.f:.3f}", f"{(score.j + score.f) / 2:.3f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def _aligned(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Align columns, the first `left` to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<"] * left + [">"] * (len(widths) - left)
    shape = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [shape.format(*row).rstrip() for row in rows]

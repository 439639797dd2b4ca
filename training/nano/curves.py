"""The training's curves as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.errors import ModelError
from tools.command import read_json_lines
from tools.plots import draw

from .steps import KINDS

SMOOTH = 40  # records


def draw_curves(log: Path, picture: Path) -> None:
    """Loss, IoU by kind of prompt on the first and the last frame, presence and rate over minutes."""
    records = read_json_lines(log)
    if not records:
        raise ModelError(f"no training log {log}: expected what python -m training.nano writes")
    with draw(picture, 2, 2, (12, 7), sharex=True) as axes:
        for axis, (title, curves) in zip(axes.flat, _panels(records).items(), strict=True):
            for name, (minutes, values) in curves.items():
                axis.plot(minutes, values, label=name)
            axis.set_title(title)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        axes[0, 0].set_yscale("log")
        for axis in axes[1]:
            axis.set_xlabel("minutes of training")


def _panels(records: list[dict[str, Any]]) -> dict[str, dict[str, tuple[Any, Any]]]:
    return {
        "loss": _curves(records, ("loss",)),
        "IoU on the prompted frame": _curves(records, KINDS),
        "IoU on the frames that follow": _curves(records, ("followed", "last")),
        "presence told rightly": _curves(records, ("presence",)),
    }


def _curves(records: list[dict[str, Any]], names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Minutes and running means of each name that is in the records."""
    found = {name: [record for record in records if name in record] for name in names}
    return {name: _curve(rows, name) for name, rows in found.items() if rows}


def _curve(records: list[dict[str, Any]], key: str) -> tuple[Any, Any]:
    minutes = np.array([record["total"] for record in records]) / 60
    values = np.array([record[key] for record in records])
    width = min(SMOOTH, len(values))
    mean = np.convolve(values, np.ones(width) / width, mode="valid")
    return minutes[width - 1 :], mean

"""A journal of figures: a JSON line for each as it comes, and nothing is measured twice."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sam3_node.errors import Sam3NodeError

ERRORS = (
    RuntimeError,
    Sam3NodeError,
    MemoryError,
    NotImplementedError,
    ValueError,
    AttributeError,
    ImportError,
)
"""Errors of one figure, after which the others are measured: above all memory, and kernels that a GPU lacks."""


class OutOfTimeError(Exception):
    """No time is left for another figure. The next call goes on with it."""


class Scale(NamedTuple):
    """Sizes of the measurements: those of SAM 3 on a GPU, or small ones for a dry run on a CPU."""

    device: torch.device
    model: str
    """A configuration of latency.step"""
    dry: bool
    rows: int
    """Tokens of the image"""
    counts: tuple[int, ...]
    """Numbers of objects"""
    calls: int
    """Timed calls of a kernel"""
    frames: int
    """Timed frames of a step"""

    def tokens(self, count: int) -> int:
        """Return a number of tokens: as given, or small in a dry run."""
        return max(64, count // 256) if self.dry else count

    def channels(self, count: int) -> int:
        """Return a number of channels: as given, or small in a dry run."""
        return count // 32 if self.dry else count


class Journal:
    """Writes figures to a file of JSON lines. Figures that the file has already are not measured again."""

    def __init__(
        self, path: Path, section: str, scale: Scale, end_s: float, context: Mapping[str, Any]
    ) -> None:
        """`end_s`: the time.monotonic() after which no figure begins. `context` goes into each line."""
        self.scale, self.errors = scale, 0
        self._path, self._section, self._context = path, section, dict(context)
        self._end_s = end_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._done = {(line["section"], line["figure"]) for line in read_lines(path)}

    def __contains__(self, figure: str) -> bool:
        return (self._section, figure) in self._done

    def measure(self, figure: str, unit: str, run: Callable[[], float | Mapping[str, float]]) -> None:
        """Measure a figure and write it, unless the file has it. An error of it is written instead, and counted.

        run: returns the value, or several by name, which go into one line. Raises OutOfTimeError where none is left.
        """
        if figure in self:
            return
        if time.monotonic() > self._end_s:
            raise OutOfTimeError
        start_s = time.monotonic()
        try:
            found = run()
            value = (
                {key: float(item) for key, item in found.items()}
                if isinstance(found, Mapping)
                else float(found)
            )
            self._write(figure, {"value": value, "unit": unit}, start_s)
        except ERRORS as error:
            self.errors += 1
            text = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
            self._write(figure, {"error": text}, start_s)
        gc.collect()
        if self.scale.device.type == "cuda":
            torch.cuda.empty_cache()

    def _write(self, figure: str, found: Mapping[str, Any], start_s: float) -> None:
        spent = {
            "took_s": round(time.monotonic() - start_s, 3),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        text = json.dumps({"section": self._section, "figure": figure, **found, **spent, **self._context})
        with self._path.open("a") as file:
            file.write(text + "\n")
        self._done.add((self._section, figure))
        print(json.dumps({"section": self._section, "figure": figure, **found}), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the figures of a journal; a line that a killed process left unfinished is dropped from the file."""
    if not path.exists():
        return []
    lines, text = [], path.read_text()
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    if whole != text:
        path.write_text(whole)
    return lines


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def median_ms(run: Callable[[], object], scale: Scale) -> float:
    """Return the median milliseconds of a call, after two that are not timed; by the device's own clock on a GPU."""
    for _ in range(2):
        run()
    synchronise(scale.device)
    times = [_time_ms(run, scale.device) for _ in range(scale.calls)]
    return sorted(times)[len(times) // 2]


def _time_ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))

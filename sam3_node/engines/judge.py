"""One stage of the reference, and beside it the engine that is to take its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.stages import Run
from .fitted import as_tuple, cast
from .layers import cosine
from .ports import OBJECTS, Port, Stage
from .report import OutputFigures


class Judge:
    """Runs as the reference's stage does; the candidate runs along on the same inputs and is compared.

    stage: the ports of the candidate. `frame` is the number of the frame, for whoever reads the figures. With
    `fault`, what the candidate gives is no answer at all, and it is not asked again.
    """

    def __init__(self, stage: Stage, reference: Run, candidate: Run) -> None:
        self.stage, self.reference, self.candidate = stage, reference, candidate
        self.frame = 0
        self.fault = ""
        self.lowest = float("inf")
        """Cosine of what differs most so far, on the inputs `worst_inputs`."""
        self.worst_inputs: tuple[Tensor, ...] = ()
        self._rows: dict[str, OutputFigures] = {}
        self._numbers: dict[str, list[tuple[Tensor, Tensor, int]]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        expected = self.reference(*inputs)
        if not self.fault:
            found = as_tuple(self.candidate(*cast(inputs, self.stage.inputs)))
            self._compare(inputs, as_tuple(expected), found)
        return expected

    def figures(self) -> Iterator[OutputFigures]:
        """Of each output that was compared, in the order of the ports."""
        for port in self.stage.outputs:
            if port.name in self._numbers:
                yield self._of_numbers(port.name)
            elif port.name in self._rows:
                yield self._rows[port.name]

    def _compare(
        self, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], found: tuple[Tensor, ...]
    ) -> None:
        self.fault = _fault(self.stage, expected, found, self.frame)
        if self.fault:
            self.lowest, self.worst_inputs = float("-inf"), inputs
            return
        agreed = self._agreed(expected, found)
        for port, left, right in zip(self.stage.outputs, expected, found, strict=True):
            if port.shape == (OBJECTS,):
                kept = self._numbers.setdefault(port.name, [])
                kept.append((left.float().cpu(), right.float().cpu(), self.frame))
            else:
                self._note(port, left[agreed], right[agreed], inputs)

    def _agreed(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """Which objects to compare in full: mask and pointer of one that is out of view for either are constants.

        Whether both see it, the presence itself tells.
        """
        names = [port.name for port in self.stage.outputs]
        if "presence" not in names:
            return torch.ones(len(expected[0]), dtype=torch.bool)
        index = names.index("presence")
        return ((expected[index] > 0) == (found[index] > 0)).cpu()

    def _note(self, port: Port, expected: Tensor, found: Tensor, inputs: tuple[Tensor, ...]) -> None:
        for left, right in zip(expected.float(), found.float(), strict=True):
            now = OutputFigures(
                self.stage.name, port.name, cosine(left, right), _error(left, right), self.frame
            )
            before = self._rows.get(port.name, now)
            worse = min(before, now, key=lambda row: row.cosine)
            self._rows[port.name] = OutputFigures(
                worse.stage, worse.output, worse.cosine, max(before.error, now.error), worse.frame
            )
            if now.cosine < self.lowest:
                self.lowest, self.worst_inputs = now.cosine, inputs

    def _of_numbers(self, name: str) -> OutputFigures:
        """One number an object: over the whole clip, since a direction takes more than one."""
        kept = self._numbers[name]
        left, right = torch.cat([item[0] for item in kept]), torch.cat([item[1] for item in kept])
        frame = max(kept, key=lambda item: (item[0] - item[1]).abs().max().item())[2]
        return OutputFigures(self.stage.name, name, cosine(left, right), _error(left, right), frame)


def _error(expected: Tensor, found: Tensor) -> float:
    """The largest difference as a part of the largest expected value."""
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((expected - found).abs().max() / scale).item()


def _fault(stage: Stage, expected: Sequence[Tensor], found: Sequence[Tensor], frame: int) -> str:
    """What makes an answer none at all; empty where it is one."""
    if len(found) != len(stage.outputs):
        return f"{stage.name}: expected {len(stage.outputs)} outputs, found {len(found)}"
    for port, left, right in zip(stage.outputs, expected, found, strict=True):
        if (right.dtype, right.shape) != (port.dtype, left.shape):
            return f"{stage.name}: expected {port.name} as {_kind(port.dtype, left)}, found {_kind(right.dtype, right)}"
        if not bool(torch.isfinite(right).all()):
            return (
                f"{stage.name}: {port.name} holds values that are not finite (NaN or inf), on frame {frame}"
            )
    return ""


def _kind(dtype: torch.dtype, tensor: Tensor) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""Modes of cameras: sizes, rates and pixel formats, and the choice of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Mode(NamedTuple):
    """Size in pixels, rate in images a second and pixel format that a camera offers."""

    width: int
    height: int
    fps: float
    form: str

    def __str__(self) -> str:
        return f"{self.width}x{self.height} at {self.fps:g} fps, {self.form}"


def choose_mode(modes: Iterable[Mode], wanted: Mode, forms: Sequence[str]) -> Mode | None:
    """Return the offered mode nearest to `wanted`, whose format is the first of `forms` that it comes in.

    The size goes before the rate: the smallest image that is not smaller than wanted, else the largest. Of its rates,
    the slowest that is not slower, else the fastest. None if no mode has a format of `forms`.
    """
    usable = [mode for mode in modes if mode.form in forms]

    def cost(mode: Mode) -> tuple[bool, int, bool, float, int]:
        is_small = mode.width < wanted.width or mode.height < wanted.height
        area, is_slow = mode.width * mode.height, mode.fps < wanted.fps - 0.5
        return (
            *(is_small, -area if is_small else area),
            *(is_slow, -mode.fps if is_slow else mode.fps),
            forms.index(mode.form),
        )

    return min(usable, key=cost, default=None)

"""Measure the duration of each stage of a frame."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# typed here, because torch does not annotate the constructor
_new_event: Callable[..., torch.cuda.Event] = torch.cuda.Event


class StageTimer:
    """Times the stages of a frame in microseconds, without waiting for the device.

    The wall clock times host stages, and all stages on a CPU. CUDA events time device stages on a GPU. `read` reads
    them after the frame's copy to the host, which has synchronised with the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spent_us: dict[str, int] = {}
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    def start(self) -> None:
        """Start a frame."""
        self._spent_us = {}

    @contextmanager
    def host(self, stage: str) -> Iterator[None]:
        """Time a stage that runs on the CPU."""
        begin = time.perf_counter_ns()
        yield
        self._spent_us[stage] = (time.perf_counter_ns() - begin) // 1000

    @contextmanager
    def device(self, stage: str) -> Iterator[None]:
        """Time a stage that runs on the model's device."""
        if not self._is_cuda:
            with self.host(stage):
                yield
            return
        if stage not in self._events:
            self._events[stage] = (_new_event(enable_timing=True), _new_event(enable_timing=True))
        begin, end = self._events[stage]
        begin.record()
        yield
        end.record()
        self._spent_us[stage] = -1  # keeps the stages in order until `read`

    def read(self) -> dict[str, int]:
        """Return the microseconds of each stage, in order. On a GPU, call it after the device has finished."""
        return {stage: self._elapsed_us(stage, spent) for stage, spent in self._spent_us.items()}

    def _elapsed_us(self, stage: str, spent_us: int) -> int:
        if spent_us >= 0:
            return spent_us
        begin, end = self._events[stage]
        return int(begin.elapsed_time(end) * 1000)

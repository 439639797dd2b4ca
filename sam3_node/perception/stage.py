"""A stage of a step, the values that stages keep for each object, and the times of stages.

`Pipeline` runs its stages in order, saves what they keep, and restores it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, TypeVar

import torch

from ..schema.state import SavedPart, SavedState
from .step import StepFrame

T = TypeVar("T")

Clock = Literal["host", "device"]
"""host: the wall clock. device: the GPU's own clock, where there is one."""


class Nothing(SavedState):
    """What most stages keep between steps."""


class Stage(SavedPart[Any]):
    """One part of a step. It reads and fills fields of a StepFrame, and keeps what `STATE` names between steps."""

    STATE: ClassVar[type[SavedState]] = Nothing
    name: ClassVar[str]
    timed: ClassVar[Clock | None] = None
    """The clock of the stage's time in `stages_us`. None: it has none."""
    counts_as: str = ""
    """Name in `stages_us` of several stages together. Empty: `name`."""
    needs_depth: ClassVar[bool] = False
    """True: the stage's time counts on frames with depth only."""
    is_optional: ClassVar[bool] = False
    """True: a frame has masks without it. If it fails, the step goes on, and the frame's `problem` says so."""

    def run(self, step: StepFrame) -> None:
        """Do the stage's part of a step."""
        raise NotImplementedError

    def finish(self, step: StepFrame) -> None:
        """Do what no mask of the frame needs. A node publishes the masks before."""

    def give_up(self) -> None:
        """Forget what `run` has left half done, as it has failed and is optional."""

    def clock(self, step: StepFrame) -> Clock | None:
        """Return the clock of this step's time. None: it is not counted on this frame."""
        if self.needs_depth and step.frame.depth is None:
            return None
        return self.timed


class PerObject(dict[int, T]):
    """A value of one kind for each object that has one, by the object's id.

    `Objects` forgets, saves and restores the values once this is registered with it.
    """

    def __init__(self, name: str, kind: type[T], saved: bool = True) -> None:
        """`name` stands in the saved state. `kind` is the values' type. Without `saved`, a restart has no values."""
        super().__init__()
        self.name = name
        self.kind = kind
        self.saved = saved


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
    def measure(self, name: str, clock: Clock | None) -> Iterator[None]:
        """Time the block under a name in `stages_us`. Host stages of one name add up."""
        if clock is None:
            yield
        elif clock == "device" and self._is_cuda:
            # one pair serves all frames: a frame's times are read before the next frame starts
            if name not in self._events:
                self._events[name] = torch.cuda.Event(True), torch.cuda.Event(True)
            begin, end = self._events[name]
            begin.record()
            yield
            end.record()
            self._spent_us[name] = -1  # keeps the stages in order until `read`
        else:
            begin_ns = time.perf_counter_ns()
            yield
            spent_us = (time.perf_counter_ns() - begin_ns) // 1000
            self._spent_us[name] = self._spent_us.get(name, 0) + spent_us

    def read(self) -> dict[str, int]:
        """Return the microseconds of each stage, in order. On a GPU, call it after the device has finished."""
        # a copy, so that a second call finds the device's stages again
        spent_us = dict(self._spent_us)
        for name in spent_us:
            if spent_us[name] < 0:
                begin, end = self._events[name]
                spent_us[name] = int(begin.elapsed_time(end) * 1000)
        return spent_us

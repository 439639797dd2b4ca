"""Copies from the device to the host that later work on the device does not delay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

_new_event: Callable[[], torch.cuda.Event] = torch.cuda.Event  # torch leaves the constructor untyped


class HostCopy:
    """A copy of a tensor on the host, which begins at once and is complete when `read` returns."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy what the current stream has written by now.

        From a GPU, the copy goes to pinned memory, behind an event. A plain copy later would wait for everything that
        the device was given in between.
        """
        self._ready: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._ready = _new_event()
            self._ready.record()
        else:
            self._values = values.clone()

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy, and for nothing that the device was given later; return the values."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values.numpy()

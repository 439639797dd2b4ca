"""Work beside the main stream of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream of its own, so that its work runs while the main stream's does; on a CPU nothing of the kind.

    Whoever works in `run` waits for its results there, so that they are plain numbers on the host afterwards.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if self._stream is not None else None

    def mark(self) -> None:
        """What was given to the main stream so far is what work in `run` builds on; what comes later, it does not
        wait for.
        """
        if self._ready is not None:
            self._ready.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Give work to the side stream."""
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield

"""Streams and graph captures of CUDA on a CPU, which refuse what CUDA leaves undefined.

Streams only count: each knows what it has waited for, so that work on one block of memory can be checked for order.
A capture records the operations of torch and of engines, and a replay repeats them on the same addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sam3_node.engines.inductor import CapturedGraph, Inputs
from sam3_node.models.sam.stages import Run

HOST_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)


class Stream:
    """A stream with a vector clock: `seen[s]` is the number of works of stream s that come before its next one."""

    count = 0

    def __init__(self) -> None:
        self.cuda_stream = Stream.count  # the default stream has 0
        Stream.count += 1
        self.seen: dict[Stream, int] = {self: 0}

    def wait_stream(self, other: Stream) -> None:
        for stream, count in other.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def enqueue(self) -> tuple[Stream, int]:
        """Add a work, and return its place: this stream and the number there."""
        self.seen[self] += 1
        return self, self.seen[self]

    def comes_after(self, place: tuple[Stream, int]) -> bool:
        return self.seen.get(place[0], 0) >= place[1]


class StrictCuda:
    """The used part of torch.cuda: streams, the current one, and whether it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Stream.count = 0
        self.current = Stream()
        self.streams = {0: self.current}
        self.tape: Tape | None = None
        for name, value in {
            "is_available": lambda: True,
            "device": lambda device: self._keep(),
            "current_device": lambda: 0,
            "set_device": lambda index: None,
            "current_stream": lambda: self.current,
            "Stream": self.new_stream,
            "is_current_stream_capturing": lambda: self.tape is not None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def capture(self, run: Run, inputs: Inputs) -> CapturedGraph:
        """Capture a call as `capture_cuda_graph` does."""
        with self.use(self.new_stream()):
            for _ in range(3):
                run(*inputs)
        self.tape = tape = Tape()
        try:
            with self.use(self.new_stream()), tape:
                outputs = run(*inputs)
        finally:
            self.tape = None
        return CapturedGraph(outputs, tape.replay)

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Run the block on a stream that is ordered like the current one."""
        before = self.current
        self.current = stream
        stream.wait_stream(before)
        try:
            yield
        finally:
            self.current = before
            before.wait_stream(stream)

    def new_stream(self) -> Stream:
        stream = Stream()
        self.streams[stream.cuda_stream] = stream
        return stream

    @contextmanager
    def _keep(self) -> Iterator[None]:
        yield


class Tape(TorchDispatchMode):
    """A record of a capture; `replay` repeats it. Nothing that it holds is freed, as in the memory pool of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Callable[[], object]] = []

    def replay(self) -> None:
        for work in self.works:
            work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in HOST_READS:
            raise AssertionError(f"{func}: the host waits for the device within a capture")
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket is torch.ops.aten.empty:
            self.works.append(lambda kept=out: kept)
        else:
            self.works.append(lambda: self._repeat(func, args, kwargs or {}, out))
        return out

    @staticmethod
    def _repeat(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        again = func(*args, **kwargs)
        for place, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
            if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                place.copy_(value)

"""Encoding ahead on a GPU: which stream waits for what. Streams and events are stand-ins, which keep a log."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sam3_node.models.sam.stages import EncodeLimits, Features
from sam3_node.perception.encode_ahead import EncodeAhead, WantedFrame
from tests.support.live import moving_frame

CUDA = torch.device("cuda")


class Stream:
    """A stream with a name: the thread's own one is "main", all others are "own"."""

    def __init__(self, cuda: "Cuda", name: str) -> None:
        self.name = name
        self._cuda = cuda

    def wait_event(self, event: "Event") -> None:
        self._cuda.log.append(f"{self.name} waits for {event.said}")


class Event:
    """An event that knows after which entry of the log it was recorded."""

    said = ""

    def __init__(self, cuda: "Cuda") -> None:
        self._cuda = cuda

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        mine = [line for line in self._cuda.log if line.startswith(stream.name)]
        self.said = f"[{mine[-1] if mine else stream.name}]"


class Cuda:
    """The used part of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = list[str]()
        self._main = Stream(self, "main")
        self._now = threading.local()
        for name, value in {
            "Stream": lambda device: Stream(self, "own"),
            "Event": lambda: Event(self),
            "stream": self.stream,
            "current_stream": self.current_stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.keep(stream))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._now, "stream", self._main)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._now.stream = stream
        yield
        self._now.stream = before

    def work(self, what: str) -> None:
        self.log.append(f"{self.current_stream().name} {what}")

    def keep(self, stream: Stream) -> None:
        self.log.append(f"memory is kept for {stream.name}")


def test_the_encoder_follows_requests_and_the_tracker_follows_the_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)

    def preprocess(image: Any) -> torch.Tensor:
        cuda.work("uploads")
        return torch.zeros(1)

    def encode(pixels: torch.Tensor) -> Features:
        cuda.work("encodes")
        return Features(pixels, pixels, pixels)

    model: Any = SimpleNamespace(
        device=CUDA, encode_limits=EncodeLimits(True, True), preprocess=preprocess, encode=encode
    )
    wanted = [WantedFrame(moving_frame(seq)) for seq in range(2)]
    with EncodeAhead(model, 1 << 24) as ahead:
        cuda.work("answers")
        first = ahead.take(wanted)
        assert first is not None
        # the second frame is encoded without being asked for
        ahead.take(wanted[1:])
        assert cuda.log == [
            "main answers",
            *2
            * [
                "own waits for [main answers]",
                "own uploads",
                "own waits for [own uploads]",
                "memory is kept for own",
                "own encodes",
            ],
        ]
        cuda.log.clear()
        assert first.take(wanted[0].frame) is not None
    assert cuda.log == ["main waits for [own encodes]", *3 * ["memory is kept for main"]]

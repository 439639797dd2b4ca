"""Decode and preprocess a frame ahead of its step, in another thread, while the model is busy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..models import TrackerModel
from ..types import Frame, Image
from ..wire import decode_image


class PreparedFrame(NamedTuple):
    """A frame whose image is decoded and preprocessed."""

    frame: Frame
    image: Image
    """BGR uint8 [h, w, 3]"""
    pixels: Tensor
    """[1, 3, S, S] on the model's device; take them by `take_pixels`"""
    uploaded: torch.cuda.Event | None
    """after which the pixels are on a GPU"""

    def take_pixels(self) -> Tensor:
        """Return the pixels. On a GPU, the current stream waits for them; the host does not."""
        if self.uploaded is not None:
            stream = torch.cuda.current_stream(self.pixels.device)
            stream.wait_event(self.uploaded)
            # else the other stream could get this memory for its next frame while this one still reads it
            self.pixels.record_stream(stream)
        return self.pixels


def prepares_ahead(model: TrackerModel) -> bool:
    """Return True where preparing a frame beside a step costs it nothing. On a CPU it takes cores from the model."""
    return model.device.type != "cpu"


class FramePreparer:
    """Decodes and preprocesses frames in any thread, on a GPU in a stream: by default one of its own."""

    def __init__(
        self, model: TrackerModel, max_frame_pixels: int, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._model = model
        self._max_frame_pixels = max_frame_pixels
        is_cuda = model.device.type == "cuda"
        self._stream = (stream or torch.cuda.Stream(model.device)) if is_cuda else None

    @torch.inference_mode()
    def __call__(self, frame: Frame) -> PreparedFrame:
        """Prepare a frame. Raises WireError if its image cannot be decoded."""
        image = decode_image(frame, self._max_frame_pixels)
        if self._stream is None:
            return PreparedFrame(frame, image, self._model.preprocess(image), None)
        with torch.cuda.stream(self._stream):
            pixels = self._model.preprocess(image)
            # an event, because to wait for the whole stream would be to wait for later frames, too
            uploaded = torch.cuda.Event()
            uploaded.record(self._stream)
        return PreparedFrame(frame, image, pixels, uploaded)

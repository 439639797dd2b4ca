"""Decode the image of a frame, preprocess it, and encode it once for all objects."""

from msgspec.structs import replace

from ...geometry import Scaling
from ...models import TrackerModel
from ...wire import decode_image
from ..joint_encoding import EncodedFrame
from ..stage import Stage
from ..step import StepFrame


class DecodeImage(Stage):
    """Decodes the image, unless a thread has. Raises WireError if it cannot be decoded; nothing is changed then."""

    name = "decode"
    timed = "host"

    def __init__(self, model: TrackerModel, max_frame_pixels: int) -> None:
        self._model = model
        self._max_frame_pixels = max_frame_pixels

    def run(self, step: StepFrame) -> None:
        """Fill `image` and `scaling`."""
        if step.prepared is not None:
            step.image = step.prepared.image
        else:
            step.image = decode_image(step.frame, self._max_frame_pixels)
        step.scaling = Scaling((step.frame.height, step.frame.width), self._model.image_size)


class Preprocess(Stage):
    """Makes the model's input of the image, unless a thread has."""

    name = "preprocess"
    timed = "device"

    def __init__(self, model: TrackerModel) -> None:
        self._model = model

    def run(self, step: StepFrame) -> None:
        """Fill `pixels`."""
        if step.prepared is not None:
            step.pixels = step.prepared.take_pixels()
        else:
            step.pixels = self._model.preprocess(step.image)


class EncodeImage(Stage):
    """Runs the encoder, unless it has run for this frame. Its features serve the tracker, the detector and prompts."""

    name = "encode"
    timed = "device"

    def __init__(self, model: TrackerModel) -> None:
        self._model = model

    def run(self, step: StepFrame) -> None:
        """Fill `features`, and the batch of `decisions`."""
        encoded = None if step.encoding is None else step.encoding.take(step.frame)
        if encoded is None:
            encoded = EncodedFrame(self._model.encode(step.pixels), None)
        step.features = encoded.features
        # a replay may encode a frame otherwise than the node did
        step.decisions = replace(step.decisions, batch=encoded.batch)

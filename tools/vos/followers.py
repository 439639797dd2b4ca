"""Follow prompted objects through a clip: the tracker with its memory in named settings, and baselines."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
import numpy.typing as npt
import torch

from sam3_node.errors import SettingsError
from sam3_node.geometry import Scaling
from sam3_node.models import Features, TrackerModel
from sam3_node.models.sam.memory_attention import METHODS as READS
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.prompts import to_model
from sam3_node.settings import TrackerSettings
from sam3_node.tracking import Tracker
from sam3_node.tracking.memory import RULES, Bools, Floats, Ints, SelectionRule
from sam3_node.types import Mask
from sam3_node.wire.frame_prompt import FramePrompt

METHODS = ("default", "copy-first", "bank-off", "first-only")
PROMPTS = ("mask", "box", "point")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = {name: name for name in ("auto", *SHORT_DTYPES.values())} | SHORT_DTYPES
COMPARED = "default,copy-first,bank-off,first-only,bank=3,bank=15+select=confident,prompt=box,prompt=point"
Masks = dict[int, Mask]


class ModelKey(NamedTuple):
    """Settings of one model, shared by all settings with the same key."""

    dtype: str
    image_size: int
    read: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A method to follow objects, and its options.

    method: default (the tracker with its bank), copy-first (the first true mask on all frames), bank-off (no memory:
    the box of the mask on the previous frame segments each frame, and an empty mask keeps that box), first-only (memory
    of the prompted frame alone).
    """

    name: str = "default"
    method: str = "default"
    prompt: str = "mask"
    dtype: str = "auto"
    bank_size: int = TrackerSettings().bank_size
    selection: str = TrackerSettings().selection
    image_size: int = 0
    read: str = TrackerSettings().read

    @property
    def model(self) -> ModelKey:
        """The key of its model."""
        return ModelKey(self.dtype, self.image_size, self.read)

    @property
    def uses_model(self) -> bool:
        return self.method != "copy-first"


def parse_settings(text: str, base: Setting) -> list[Setting]:
    """Parse comma-separated settings, each `base` with changes joined by +, such as bank=15+select=confident.

    Changes are a method, bank=N, select=RULE, read=METHOD, dtype=TYPE, size=PIXELS or prompt=KIND. Raises SettingsError
    for anything else, and for a setting that occurs twice.
    """
    settings = [_parse(name.strip(), base) for name in text.split(",")]
    names = [setting.name for setting in settings]
    if len(set(names)) < len(names):
        raise SettingsError(f"settings: expected each once, found {', '.join(names)}")
    return settings


def _parse(name: str, base: Setting) -> Setting:
    changes: dict[str, Any] = {"name": name}
    for part in name.split("+"):
        key, equals, value = part.partition("=")
        if not equals and part in METHODS:
            changes["method"] = part
        elif equals and key in _READERS:
            field, read = _READERS[key]
            changes[field] = read(value)
        else:
            expected = (*METHODS, *(f"{key}=…" for key in _READERS))
            raise SettingsError(f"setting {part!r}: expected one of {', '.join(expected)}")
    return replace(base, **changes)


def _number(key: str, minimum: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not value.isdigit() or int(value) < minimum:
            raise SettingsError(f"{key}={value}: expected a whole number of {minimum} or more")
        return int(value)

    return read


def _choice(key: str, choices: dict[str, str]) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in choices:
            raise SettingsError(f"{key}={value}: expected one of {', '.join(choices)}")
        return choices[value]

    return read


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bank": ("bank_size", _number("bank", 2)),
    "select": ("selection", _choice("select", {name: name for name in RULES})),
    "read": ("read", _choice("read", {name: name for name in READS})),
    "size": ("image_size", _number("size", 0)),
    "dtype": ("dtype", _choice("dtype", DTYPES)),
    "prompt": ("prompt", _choice("prompt", {name: name for name in PROMPTS})),
}


class EncodedFrame(NamedTuple):
    """A frame as encoded by the model."""

    features: Features
    scaling: Scaling


class Follower(Protocol):
    """Steps through the frames of a clip; between two steps, objects are prompted on the frame just stepped."""

    def step(self, view: EncodedFrame) -> Masks:
        """Return the masks, at the frame's size, of all objects that were prompted on earlier frames."""

    def prompt(self, view: EncodedFrame, object_id: int, truth: Mask) -> None:
        """Begin to follow an object by its true mask on this frame."""


def make_follower(setting: Setting, model: TrackerModel, max_objects: int) -> Follower:
    """Make the follower of a setting; ModelError at the first prompt if the weights cannot track."""
    if setting.method == "copy-first":
        return CopyFirst()
    if setting.method == "bank-off":
        return BoxToBox(Tracker(model, max_objects=1, bank_size=2), setting.prompt)
    rule = PROMPTED_ONLY if setting.method == "first-only" else setting.selection
    return Tracked(Tracker(model, max_objects, setting.bank_size, rule), setting.prompt)


def _none(ages: Ints, scores: Floats, limit: int) -> Bools:
    return np.zeros(ages.shape, np.bool_)


PROMPTED_ONLY = SelectionRule(_none)


class Tracked:
    """The tracker, run as in the pipeline."""

    def __init__(self, tracker: Tracker, prompt: str) -> None:
        self._tracker = tracker
        self._kind = prompt

    def step(self, view: EncodedFrame) -> Masks:
        tracks = self._tracker.step_features(view.features)
        pairs = zip(tracks.ids, tracks.logits.float().cpu().numpy(), strict=True)
        return {object_id: rasterize(low, view.scaling.frame_size) for object_id, low in pairs}

    def prompt(self, view: EncodedFrame, object_id: int, truth: Mask) -> None:
        prompt = to_model(make_prompt(self._kind, truth), object_id, view.scaling)
        self._tracker.prompt_at(view.features, self._tracker.frame_number - 1, prompt)


class BoxToBox:
    """No memory: the box of the mask on the previous frame segments each frame; a lost object keeps its box."""

    def __init__(self, tracker: Tracker, prompt: str) -> None:
        self._tracker = tracker
        self._kind = prompt
        self._boxes: dict[int, tuple[int, int, int, int]] = {}

    def step(self, view: EncodedFrame) -> Masks:
        prompts = {object_id: FramePrompt(box=box) for object_id, box in self._boxes.items()}
        masks = {object_id: self._segment(view, prompt) for object_id, prompt in prompts.items()}
        self._boxes |= {object_id: mask.box for object_id, mask in masks.items() if mask.area}
        return masks

    def prompt(self, view: EncodedFrame, object_id: int, truth: Mask) -> None:
        mask = truth if self._kind == "mask" else self._segment(view, make_prompt(self._kind, truth))
        self._boxes[object_id] = mask.box if mask.area else truth.box

    def _segment(self, view: EncodedFrame, prompt: FramePrompt) -> Mask:
        logits, _ = self._tracker.segment(view.features, to_model(prompt, 0, view.scaling))
        return rasterize(logits.float().cpu().numpy(), view.scaling.frame_size)


class CopyFirst:
    """The true mask of the prompted frame, on every frame after it."""

    def __init__(self) -> None:
        self._masks: Masks = {}

    def step(self, view: EncodedFrame) -> Masks:
        return dict(self._masks)

    def prompt(self, view: EncodedFrame, object_id: int, truth: Mask) -> None:
        self._masks[object_id] = truth


def make_prompt(kind: str, truth: Mask) -> FramePrompt:
    """Make a prompt of kind mask, box (the tight one) or point (the most interior one) from a true mask."""
    if kind == "mask":
        return FramePrompt(mask=truth)
    if kind == "box":
        return FramePrompt(box=truth.box)
    return FramePrompt(points=[interior_point(truth.full())])


def interior_point(mask: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Return the centre (x, y) of the mask's pixel farthest from its outside; beyond the image's border is outside."""
    padded = np.pad(mask.astype(np.uint8), 1)
    distance = cv2.distanceTransform(padded, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[1:-1, 1:-1]
    y, x = np.unravel_index(int(distance.argmax()), distance.shape)
    return float(x) + 0.5, float(y) + 0.5


@torch.inference_mode()
def encode_frame(model: TrackerModel, image: npt.NDArray[np.uint8]) -> EncodedFrame:
    """Encode BGR uint8 [h, w, 3] as the pipeline does."""
    features = model.encode(model.preprocess(image))
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return EncodedFrame(features, Scaling((image.shape[0], image.shape[1]), model.image_size))

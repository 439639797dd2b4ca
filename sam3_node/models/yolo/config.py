"""The configuration of a YOLO-World: the public scales, a small scale, and the JSON form that lies beside weights."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

from ...errors import ModelError
from ..pixels import Resize

MODEL_TYPE = "yolo_world"
STRIDES = (8, 16, 32)  # of the heads' input maps, in pixels of the network's input


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True)
class YoloWorldConfig:
    """Widths in channels, depths in blocks. Raises ModelError if they are inconsistent.

    channels: channels of the backbone's maps at strides 2, 4, 8, 16 and 32; the neck uses the last three.
    depths: blocks at strides 4, 8, 16 and 32. neck_depth: blocks in each layer of the neck.
    box_channels, embedding_channels: channels of the heads' towers for boxes and for similarities.
    text_channels: length of a phrase's vector. attention_channels: channels of each head of the max-sigmoid attention.
    bins: number of bins for a side's distance from its anchor, one stride each.
    image_size: side of the square training images, in pixels.
    resize: how frames are fitted into the input: "bilinear", as the public implementation does it, or "antialias".
    """

    channels: tuple[int, int, int, int, int]
    depths: tuple[int, int, int, int]
    neck_depth: int
    box_channels: int
    embedding_channels: int
    text_channels: int = 512
    attention_channels: int = 32
    bins: int = 16
    image_size: int = 640
    resize: Resize = "bilinear"

    def __post_init__(self) -> None:
        for name, length in (("channels", 5), ("depths", 4)):
            values = getattr(self, name)
            if len(values) != length or not all(_is_positive(value) for value in values):
                raise ModelError(
                    f"YOLO-World {name}: expected {length} positive integers, found {list(values)}"
                )
        if self.resize not in typing.get_args(Resize):
            raise ModelError(f"YOLO-World resize: expected bilinear or antialias, found {self.resize!r}")
        for field in dataclasses.fields(self)[2:]:
            if field.name != "resize" and not _is_positive(getattr(self, field.name)):
                raise ModelError(
                    f"YOLO-World {field.name}: expected a positive integer, found {getattr(self, field.name)!r}"
                )
        unit = 2 * self.attention_channels
        if any(channels % unit for channels in self.channels[2:]):
            raise ModelError(
                f"YOLO-World channels at strides 8, 16 and 32: expected multiples of {unit}, twice attention_channels, "
                f"found {list(self.channels[2:])}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return a map that `from_json` reads."""
        return {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> YoloWorldConfig:
        """Read the result of `to_json`. Raises ModelError, which names missing, unknown or wrong fields."""
        kind = data.get("model_type") if isinstance(data, dict) else None
        if kind != MODEL_TYPE:
            raise ModelError(
                f"expected a map with model_type {MODEL_TYPE}, found {kind or type(data).__name__}"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        data = {"resize": "bilinear"} | data
        if wrong := sorted(data.keys() ^ (names | {"model_type"})):
            raise ModelError(f"expected {', '.join(sorted(names))}; missing or unknown: {', '.join(wrong)}")
        values = {name: data[name] for name in names}
        for name in ("channels", "depths"):
            if not isinstance(values[name], list):
                raise ModelError(f"{name}: expected a list, found {values[name]!r}")
            values[name] = tuple(values[name])
        return cls(**values)


Scale = typing.Literal["nano", "s", "m", "l", "x"]
SCALES: dict[Scale, YoloWorldConfig] = {
    "nano": YoloWorldConfig(
        (16, 24, 48, 96, 160),
        (1, 1, 1, 1),
        1,
        32,
        48,
        text_channels=64,
        attention_channels=8,
        image_size=320,
        resize="antialias",
    ),
    "s": YoloWorldConfig((32, 64, 128, 256, 512), (1, 2, 2, 1), 1, 64, 128),
    "m": YoloWorldConfig((48, 96, 192, 384, 576), (2, 4, 4, 2), 2, 64, 192),
    "l": YoloWorldConfig((64, 128, 256, 512, 512), (3, 6, 6, 3), 3, 64, 256),
    "x": YoloWorldConfig((80, 160, 320, 640, 640), (3, 6, 6, 3), 3, 80, 320),
}

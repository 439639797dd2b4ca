"""The settings of the camera `sam3`."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.cameras.configs import CameraConfig

CONTENTS = ("overlay", "masks", "image")


@CameraConfig.register_subclass("sam3")
@dataclass(kw_only=True)
class Sam3CameraConfig(CameraConfig):
    """What a camera of lerobot shows of a node: its frames, its masks, or the masks over the frames.

    Raises ValueError, which names the field.
    """

    frames: str = "tcp://127.0.0.1:5550"
    """endpoint of the camera's frames"""
    masks: str = "tcp://127.0.0.1:5551"
    """endpoint of the node's masks"""
    camera: str = "cam0"
    """name of the node's camera"""
    content: str = "overlay"
    """overlay: the frame with usable masks tinted; masks: three labels in the red, green and blue channel; image: the
    frame alone"""
    labels: list[str] = field(default_factory=list)
    """labels of the objects, a name twice for two of them; none: any object, in an overlay alone"""
    use_depth: bool = False
    """also give the frame's depth, which must be aligned to its colour"""
    mask_max_age_ms: float = 500.0
    """a mask whose frame is older is left out"""
    timeout_s: float = 10.0
    """longest wait of `connect` for a first frame"""

    def __post_init__(self) -> None:
        if not self.width or not self.height:
            raise ValueError("width and height: expected the size of the pictures, such as 640 and 480")
        if self.content not in CONTENTS:
            raise ValueError(f"content: expected one of {', '.join(CONTENTS)}; found {self.content!r}")
        if self.content == "masks" and not 1 <= len(self.labels) <= 3:
            raise ValueError(
                f"labels: expected one to three for the content masks, found {len(self.labels)}; use another camera "
                "for more"
            )

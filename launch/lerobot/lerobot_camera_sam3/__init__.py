"""Masks of sam3-node as a camera of lerobot: `{type: sam3, …}` among the cameras of a robot."""

from .config_sam3_camera import Sam3CameraConfig
from .sam3_camera import Sam3Camera

__all__ = ["Sam3Camera", "Sam3CameraConfig"]

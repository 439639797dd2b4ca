"""The name under which earlier releases had `write_yolo`, for programs that import it."""

from .outputs.yolo import write_yolo as write_yolo

"""A tiny folder of training clips: a red and a blue rectangle that move over grey."""

from pathlib import Path

import numpy as np

from tools.scenes.clips import Clip, write_clip

FRAMES = 6
HEIGHT = 48
WIDTH = 64
GREY = 110
COLOURS = {1: (30, 30, 220), 2: (220, 30, 30)}  # BGR of object ids


def rectangle_clip(shift: int = 0) -> Clip:
    """Object 1 moves to the right, object 2 down; `shift` pixels set clips apart."""
    labels = [np.zeros((HEIGHT, WIDTH), np.uint8) for _ in range(FRAMES)]
    for index, label in enumerate(labels):
        label[6 + shift : 24 + shift, 8 + 2 * index : 26 + 2 * index] = 1
        label[12 + 2 * index : 30 + 2 * index, 42 - shift : 58 - shift] = 2
    frames = [np.full((HEIGHT, WIDTH, 3), GREY, np.uint8) for _ in labels]
    for frame, label in zip(frames, labels, strict=True):
        for number, colour in COLOURS.items():
            frame[label == number] = colour
    return Clip("rectangles", frames, labels, meta={"fps": 12})


def write_rectangles(root: Path) -> Path:
    """Two clips, `a` and `b`, of six frames each; -> their folder."""
    for shift, name in enumerate("ab"):
        write_clip(root, name, rectangle_clip(3 * shift))
    return root

"""Move and bend labelled clips: a camera that wanders, zooms and turns, over a picture that deforms.

    python -m tools.doubt.moved CLIPS -o out/moved --frames 32

Clips of real cameras that stand still say nothing about cameras that move. Here every frame of such a clip is seen
through a window that wanders and through a smooth shift that changes, and the labels with it, so that the motion's
truth is exact. A shorter clip is played forth and back. Objects of unknown truth stay unknown.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import cv2
import numpy as np

from sam3_node.types import Image
from tools.command import errors_in_one_line, new_parser
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from tools.train_nano.taught import bending, camera_path, see
from tools.vos.sequences import UNKNOWN

LONGEST = 480  # px
WAYS = 3  # windows that the camera goes to, one after the other


def move_clip(clip: Clip, frames: int) -> tuple[Clip, list[int]]:
    """Return the moved clip and the frame of the original that each frame shows. The name decides the motion."""
    rng = np.random.default_rng(zlib.crc32(clip.name.encode()))
    order = [*range(len(clip)), *range(len(clip) - 2, 0, -1)]
    shown = [order[number % len(order)] for number in range(frames)]
    shape = _shrunk(clip.image(0), cv2.INTER_AREA).shape[:2]
    path = camera_path(rng, shape, frames, WAYS)
    views = [
        see(affine, shift, _shrunk(clip.image(i), cv2.INTER_AREA), _shrunk(clip.labels(i), cv2.INTER_NEAREST))
        for i, affine, shift in zip(shown, path, bending(rng, shape, frames), strict=True)
    ]
    meta = {**clip.meta, "width": shape[1], "height": shape[0], "scenario": "moved"}
    return Clip(clip.name, [view[0] for view in views], [view[1] for view in views], meta=meta), shown


def _shrunk(image: Image, how: int) -> Image:
    scale = min(1.0, LONGEST / max(image.shape[:2]))
    return np.asarray(cv2.resize(image, None, fx=scale, fy=scale, interpolation=how), np.uint8)


def move_all(args: argparse.Namespace) -> None:
    """Move all clips of a folder."""
    path = args.clips / UNKNOWN
    unknown = json.loads(path.read_text()) if path.is_file() else {}
    moved = {}
    for name in list_clips(args.clips):
        clip, shown = move_clip(read_clip(args.clips, name), args.frames)
        write_clip(args.out, name, clip)
        pairs = unknown.get(name, [])
        moved[name] = [[number, i] for number, at in enumerate(shown) for frame, i in pairs if frame == at]
        print(f"{name}: {len(clip)} frames", flush=True)
    (args.out / UNKNOWN).write_text(json.dumps(moved))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("clips", type=Path, help="folder of clips with labels")
    parser.add_argument("--frames", type=int, default=32, help="frames of a clip")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the moved clips")
    with errors_in_one_line():
        move_all(parser.parse_args())


if __name__ == "__main__":
    main()

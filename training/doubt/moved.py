"""Move and bend labelled pictures and clips: a camera that wanders, zooms and turns, over things that deform.

    python -m training.doubt.moved out/doubt/real -o out/moved
    python -m training.doubt.moved out/taught/held -o out/joined

Real clips of cameras that stand still say nothing about cameras that move. Here every frame is seen through a window
that wanders and through a smooth shift that changes, and the labels with it, so that the motion's truth is exact. A
shorter clip is played forth and back. Objects of unknown truth stay unknown.

SOURCE is a folder of clips, or of shards of taught pictures (`training.nano teach`). A clip of a picture has objects
that are two neighbours at least: a tracker that falls back to parts of one colour loses the rest of them.
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from sam3_node.types import Image
from tools.command import errors_in_one_line, new_parser
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from tools.vos.sequences import UNKNOWN
from training.nano.taught import bending, camera_path, draw_labels, join, list_shards, read_all, see

LONGEST = 480  # px
# of a taught picture
MOST_PARTS = 10
MOST_OBJECTS = 3
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


def open_clips(source: Path) -> Iterator[Clip]:
    """Yield the clips of a folder, or a clip of one frame for each taught picture with joined objects."""
    shards = list_shards(source)
    if not shards:
        yield from (read_clip(source, name) for name in list_clips(source))
    for number, picture in enumerate(read_all(shards)):
        rng = np.random.default_rng(number)
        image = picture.image()
        single = draw_labels(rng, image, picture.masks(), MOST_PARTS)
        joined = join(rng, single, often=1.0)
        ids = [i for i in np.unique(joined)[1:] if len(np.unique(single[joined == i])) > 1]
        labels = np.zeros_like(joined)
        for new, i in enumerate(ids[:MOST_OBJECTS]):
            labels[joined == i] = new + 1
        if ids:
            objects = [{"id": new + 1, "name": f"object {new + 1}"} for new in range(labels.max())]
            yield Clip(f"{number:05d}", [image], [labels], meta={"fps": 10, "objects": objects})


def _shrunk(image: Image, how: int) -> Image:
    scale = min(1.0, LONGEST / max(image.shape[:2]))
    return np.asarray(cv2.resize(image, None, fx=scale, fy=scale, interpolation=how), np.uint8)


def move_all(args: argparse.Namespace) -> None:
    """Move all clips of a source."""
    path = args.source / UNKNOWN
    unknown = json.loads(path.read_text()) if path.is_file() else {}
    moved = {}
    for clip in open_clips(args.source):
        made, shown = move_clip(clip, args.frames)
        write_clip(args.out, clip.name, made)
        pairs = unknown.get(clip.name, [])
        moved[clip.name] = [
            [number, i] for number, at in enumerate(shown) for frame, i in pairs if frame == at
        ]
        print(f"{clip.name}: {len(clip)} frames", flush=True)
    (args.out / UNKNOWN).write_text(json.dumps(moved))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("source", type=Path, help="folder of clips with labels, or of shards")
    parser.add_argument("--frames", type=int, default=32, help="frames of a clip")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the moved clips")
    with errors_in_one_line():
        move_all(parser.parse_args())


if __name__ == "__main__":
    main()

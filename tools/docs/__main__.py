"""Command-line entry point: `python -m tools.docs` writes the generated parts, `--check` only compares them.

`--gif overlay.mp4` draws docs/images/demo.gif from the overlay of a replay, docs/development.md has the two commands.
"""

import argparse
import sys
from pathlib import Path

from .pages import ROOT, outdated

STEP = 4
SIZE = (400, 300)
COLOURS = 48


def write_gif(video: Path, out: Path) -> None:
    """Write every STEP-th frame of a video of 15 Hz as a GIF, smoothed so that it stays near 1 MB."""
    import cv2
    from PIL import Image

    reader = cv2.VideoCapture(str(video))
    frames = []
    while (frame := reader.read()[1]) is not None:
        frames.append(frame)
    small = (cv2.resize(frame, SIZE, interpolation=cv2.INTER_AREA) for frame in frames[::STEP])
    smooth = [Image.fromarray(cv2.bilateralFilter(frame, 9, 30, 5)[..., ::-1].copy()) for frame in small]
    # the octree keeps the colours of small masks, which the median cut gives to the table
    palette = smooth[0].quantize(COLOURS, Image.Quantize.FASTOCTREE)
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in smooth)
    first.save(out, save_all=True, append_images=rest, duration=1000 * STEP // 15, loop=0)


def main() -> int:
    """Refresh the pages, and print the name of each page that changed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for outdated pages")
    parser.add_argument("--gif", type=Path, metavar="VIDEO", help="draw the README's GIF from this overlay")
    options = parser.parse_args()
    if options.gif:
        write_gif(options.gif, ROOT / "docs/images/demo.gif")
    changed = outdated()
    for path, text in changed.items():
        print("outdated:" if options.check else "wrote", path.relative_to(ROOT))
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Pack training data, and train from a pack.

    python -m research.nano_pack out/scenes/train --val out/scenes/val -o out/pack.zip
    python -m research.nano_pack out/pack.zip --train out/packed

A machine that only trains needs neither MuJoCo nor a network. It passes no gates: the pack holds no test clips.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from sam3_node.errors import Sam3NodeError
from tools.scenes.__main__ import positive, size
from training.nano.data import Sources
from training.nano.export import export
from training.nano.train import Trainer, stages

from .read import unpack
from .write import Pack, pack


def main(words: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = vars(parse(words))
    folder = options.pop("train")
    minutes = options.pop("minutes")
    output = options.pop("output")
    source = options.pop("source")
    try:
        if folder:
            print(train(source, folder, *minutes))
        else:
            summary = pack(Pack(source, max_bytes=int(options.pop("most")), **options), output)
            print(f"{output}: {', '.join(summary)}, {output.stat().st_size / 1e6:.1f} MB")
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def train(path: Path, folder: Path, frame_minutes: float, clip_minutes: float) -> Path:
    """Unpack a pack below `folder`, train from it, and return the path of the weights."""
    data = folder / "pack"
    unpack(path, data)
    sources = Sources(data / "train", folder / "cache", cutouts=data / "cutouts", videos=data / "videos")
    trainer = Trainer(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    trainer.run(stages(frame_minutes, clip_minutes), sources, workers=1)
    return export(trainer.path, folder / "export")


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m research.nano_pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="folder of training clips, or a pack to train from")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/pack.zip"), help="the zip file")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="train from the pack in this folder")
    parser.add_argument("--minutes", type=float, nargs=2, default=(60, 240), help="on frames and on clips")
    parser.add_argument("--val", type=Path, help="folder of held-out clips, all of which are packed")
    parser.add_argument("--most", type=float, default=55e6, help="maximum bytes of the zip file")
    parser.add_argument("--size", type=size, default=(256, 192), metavar="WxH", help="maximum frame size")
    parser.add_argument("--quality", type=positive, default=60, help="JPEG quality, 1..100")
    parser.add_argument("--cutouts", type=Path, help="folder of RGBA PNG files")
    parser.add_argument("--sprites", type=positive, default=1500, help="maximum number of cut-outs")
    parser.add_argument("--videos", type=Path, help="folder of mp4 files")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

"""Pack training data, and train from a pack.

    python -m training.pack out/scenes/train --part rendered=out/scenes/val:2 -o out/pack.zip
    python -m training.pack out/pack.zip --train out/packed       from random weights
    python -m training.pack out/pack.zip --run out/run            the run of nano: from the weights in the package
    python -m training.pack out/pack.zip --table out/run          its table of candidates alone

A machine that only trains needs neither MuJoCo nor a network: the pack and this checkout are enough.
training/pack/run.py describes `--run`.
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
from .run import Run, make_table, run, train_seed
from .write import Pack, Part, pack


def main(words: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse(words)
    try:
        return _act(args)
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _act(args: argparse.Namespace) -> int:
    if args.train:
        print(train(args.source, args.train, *(args.minutes or (60, 240))))
    elif args.run or args.table:
        plan = Run(
            args.source,
            args.run or args.table,
            minutes=(args.minutes or (9.0,))[0],
            seeds=args.seeds,
            device=args.device,
            rate=args.rate,
            workers=args.workers,
            many=args.many,
            every=args.every,
            table=not args.no_table,
        )
        if args.seed is not None:
            train_seed(plan, args.seed)
        elif args.table:
            make_table(plan)
        else:
            return run(plan)
    else:
        what = Pack(
            args.source,
            int(args.most),
            args.size,
            args.quality,
            tuple(args.part),
            args.tracks,
            args.taught,
            tuple(args.weights),
            args.cutouts,
            args.sprites,
            args.videos,
        )
        summary = pack(what, args.output)
        print(f"{args.output}: {', '.join(summary)}, {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


def train(path: Path, folder: Path, frame_minutes: float, clip_minutes: float) -> Path:
    """Unpack a pack below `folder`, train from it, and return the path of the weights."""
    data = folder / "pack"
    unpack(path, data)
    sources = Sources(data / "train", folder / "cache", cutouts=data / "cutouts", videos=data / "videos")
    trainer = Trainer(folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    trainer.run(stages(frame_minutes, clip_minutes), sources, workers=1)
    return export(trainer.path, folder / "export")


def read_part(text: str) -> Part:
    """Read NAME=FOLDER or NAME=FOLDER:EVERY."""
    name, equals, rest = text.partition("=")
    folder, _, every = rest.partition(":")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER or NAME=FOLDER:EVERY, found {text!r}")
    return Part(name, Path(folder), positive(every or "1"))


def read_weights(text: str) -> tuple[str, Path]:
    """Read NAME=FILE."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, found {text!r}")
    return name, Path(path)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.pack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="folder of training clips, or a pack to train from")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/pack.zip"), help="the zip file")
    acts = parser.add_mutually_exclusive_group()
    acts.add_argument("--train", type=Path, metavar="FOLDER", help="train from the pack in this folder")
    acts.add_argument("--run", type=Path, metavar="FOLDER", help="the run of two seeds, in this folder")
    acts.add_argument("--table", type=Path, metavar="FOLDER", help="the candidates of a run in this folder")
    minutes = "of --run (9), or on frames and on clips of --train (60 240)"
    parser.add_argument("--minutes", type=float, nargs="+", help=minutes)
    parser.add_argument("--seeds", type=positive, default=2, help="of --run, side by side")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # the process of one seed
    parser.add_argument("--device", help="of --run: default cuda if there is one")
    parser.add_argument("--rate", type=float, default=2e-4, help="of --run: learning rate at its peak")
    parser.add_argument("--workers", type=positive, help="of --run: processes that draw one kind of batch")
    many = "of --run: times as many clips in a batch; default 1 on a CPU, 4 on a GPU"
    parser.add_argument("--many", type=float, help=many)
    every = "of --run: seconds between checkpoints and validations"
    parser.add_argument("--every", type=float, default=60.0, help=every)
    parser.add_argument("--no-table", action="store_true", help="of --run: without the table of candidates")
    part = "of the validation: clips, all of which are packed, or every N-th frame of them"
    parser.add_argument(
        "--part", type=read_part, action="append", default=[], metavar="NAME=FOLDER[:N]", help=part
    )
    parser.add_argument("--tracks", type=Path, help="folder of clips by training.doubt.pseudo --moving")
    parser.add_argument("--taught", type=Path, help="folder of shards by training.nano teach")
    weights = "a model.safetensors to mix with, such as one of an earlier commit"
    parser.add_argument(
        "--weights", type=read_weights, action="append", default=[], metavar="NAME=FILE", help=weights
    )
    parser.add_argument("--most", type=float, default=55e6, help="maximum bytes of the zip file")
    parser.add_argument("--size", type=size, default=(256, 192), metavar="WxH", help="maximum frame size")
    parser.add_argument("--quality", type=positive, default=60, help="JPEG quality, 1..100")
    parser.add_argument("--cutouts", type=Path, help="folder of RGBA PNG files")
    parser.add_argument("--sprites", type=positive, default=1500, help="maximum number of cut-outs")
    parser.add_argument("--videos", type=Path, help="folder of mp4 files")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())

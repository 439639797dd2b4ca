"""Train the nano detector.

    python -m training.detector              train and export
    python -m training.detector export       export the weights of the last checkpoint
    python -m training.detector check        score the exported weights on a split, and draw a contact sheet

It can be killed at any time; the same command resumes from a checkpoint at most a minute old. It uses a GPU if there is
one. Results are in --output, the weights in its folder `export`, or in the package with --install.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

from sam3_node.detection.detectors import NANO
from tools.command import add_compute_options, choose_device, errors_in_one_line, new_parser, set_up_cpu
from training.nano.augment import OPENCLIPART, load_cutouts

from .check import check
from .data import Scenes
from .network import export
from .train import RATE, Trainer

CUTOUTS = 3000


def main() -> None:
    args = _arguments()
    set_up_cpu(args.threads)
    with errors_in_one_line():
        _run(args)


def _run(args: argparse.Namespace) -> None:
    if args.command == "check":
        folder = args.weights or _exported(args)
        check(folder, args.scenes / args.split, args.every, args.size, args.output / f"{args.split}.png")
        return
    if args.command is None:
        sprites = load_cutouts(args.cutouts, CUTOUTS, args.output / "cache" / "cutouts.npz")
        scenes = Scenes(args.scenes / "train", sprites, args.beside)
        trainer = Trainer(args.output, scenes.words, choose_device(args.device), args.init)
        trainer.run(scenes, args.minutes * 60, args.workers, args.rate, args.seed)
    checkpoints = [folder / "last.pt" for folder in (args.output, *args.mean)]
    path = export(checkpoints, _exported(args), args.init if args.halfway else None)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _exported(args: argparse.Namespace) -> Path:
    return NANO if args.install else args.output / "export"


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, "python -m training.detector")
    parser.add_argument("command", nargs="?", choices=("export", "check"))
    _add_training(parser)
    _add_results(parser)
    args = parser.parse_args()
    if args.halfway and not (args.command == "export" and args.init and args.init.is_dir()):
        parser.error("--halfway is of `export` alone, and needs a folder as --init")
    if args.mean and args.command != "export":
        parser.error("--mean is of `export` alone")
    return args


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenes", type=Path, default=Path("out/scenes"), help="with train, val, test")
    parser.add_argument("--beside", type=Path, help="further clips, such as --nameless renders")
    parser.add_argument("--cutouts", type=Path, default=OPENCLIPART, help="folder of RGBA PNG files")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/train_detector"), help="results")
    parser.add_argument("--minutes", type=float, default=60, help="minutes of training")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate at its peak")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures that are drawn")
    add_compute_options(parser)
    parser.add_argument("--init", type=Path, help="initial weights: last.pt of another training, or a folder")


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export` and `check`."""
    mean = "`export` the mean with these runs, which began from the same weights"
    parser.add_argument("--mean", type=Path, nargs="+", default=[], metavar="OUTPUT", help=mean)
    parser.add_argument("--halfway", action="store_true", help="`export` halfway between --init and the mean")
    parser.add_argument("--install", action="store_true", help="export into the package, or check that")
    parser.add_argument("--split", choices=("train", "val", "test"), default="val", help="split to check")
    parser.add_argument("--weights", type=Path, help="folder of weights to check; default: the exported ones")
    parser.add_argument("--every", type=int, default=4, help="check one of this many frames")
    parser.add_argument("--size", type=int, default=0, help="px of the network's input; 0: as trained")


if __name__ == "__main__":
    main()

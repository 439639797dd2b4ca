"""Train the nano tracker.

    python -m training.nano                  everything: scenes where there are none, training, export
    python -m training.nano export           weights of the last checkpoint
    python -m training.nano pictures         train on these masks, beginning from --init
    python -m training.nano teach PICTURES   a teacher's masks of real pictures, see training/nano/teach.py

It can be killed at any time; the same command goes on from the last minute. On a GPU if there is one. What it makes
lies in --output; the weights in its folder `export`, or in the package with --install.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

from sam3_node.models.checkpoints import NANO
from tools.command import add_compute_options, choose_device, errors_in_one_line, new_parser, set_up_cpu

from . import teach
from .augment import OPENCLIPART
from .data import Sources
from .export import export
from .train import PICTURE_RATE, Trainer, picture_stages, stages

RENDERED = ("--split", "train", "--clips", "2400", "--frames", "16", "--size", "320x240", "--fps", "12")


def main() -> None:
    if sys.argv[1:2] == ["teach"]:
        return teach.main(sys.argv[2:])
    args = _arguments()
    set_up_cpu(args.threads)
    with errors_in_one_line():
        if args.command != "export":
            _train(args)
        _export(args)


def _train(args: argparse.Namespace) -> None:
    """Train on rendered scenes, or with `pictures` on what a teacher has labelled, with clips beside it."""
    trainer = Trainer(args.output, choose_device(args.device), args.init, args.mixed, args.seed)
    scenes = args.scenes / "train"
    cache = args.output / "cache"
    _render(scenes, args.workers)
    if args.command == "pictures":
        sources = Sources(scenes, cache, cutouts=args.cutouts, taught=args.taught / "train")
        plan = picture_stages(args.picture_minutes, args.picture_rate)
    else:
        sources = Sources(scenes, cache, cutouts=args.cutouts, videos=args.videos)
        plan = stages(args.frame_minutes, args.clip_minutes)
    trainer.run(plan, sources, args.workers)


def _render(folder: Path, workers: int) -> None:
    """Render scenes to train on, where there are none."""
    if (folder / "Clips").is_dir():
        return
    words = [*RENDERED, "--workers", str(workers), "-o", str(folder)]
    subprocess.run([sys.executable, "-m", "tools.scenes", *words], check=True)


def _export(args: argparse.Namespace) -> None:
    beside = [folder / "last.pt" for folder in args.beside]
    start = args.init if args.halfway else None
    path = export(args.output / "last.pt", NANO if args.install else args.output / "export", beside, start)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, "python -m training.nano")
    parser.add_argument("command", nargs="?", choices=("export", "pictures"))
    parser.add_argument("--scenes", type=Path, default=Path("out/scenes"), help="holds the folder train")
    parser.add_argument("--cutouts", type=Path, default=OPENCLIPART, help="folder of RGBA PNG files")
    parser.add_argument("--videos", type=Path, help="folder of mp4 files for backgrounds")
    parser.add_argument("--taught", type=Path, default=Path("out/taught"), help="folder that teach has made")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/train_nano"))
    parser.add_argument("--frame-minutes", type=float, default=60, help="on single frames")
    parser.add_argument("--clip-minutes", type=float, default=240, help="on clips")
    parser.add_argument("--picture-minutes", type=float, default=240, help="on taught pictures")
    parser.add_argument("--picture-rate", type=float, default=PICTURE_RATE, help="peak learning rate there")
    parser.add_argument("--mixed", action="store_true", help="bfloat16 in the encoder and decoder")
    add_compute_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="another seed for a run beside this one")
    parser.add_argument("--init", type=Path, help="a model.safetensors to begin from")
    parser.add_argument("--install", action="store_true", help="export into the package")
    beside = "`export` the mean with these runs, which began from the same weights"
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="FOLDER", help=beside)
    parser.add_argument("--halfway", action="store_true", help="`export` halfway between --init and the mean")
    args = parser.parse_args()
    _refuse_misplaced(parser, args)
    return args


def _refuse_misplaced(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse options that are of another command."""
    if args.halfway and not (args.init and args.command == "export"):
        parser.error("--halfway is of `export` alone, and needs --init")
    if args.beside and args.command != "export":
        parser.error("--beside is of `export` alone")


if __name__ == "__main__":
    main()

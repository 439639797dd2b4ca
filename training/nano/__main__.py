"""Train the nano tracker.

    python -m training.nano                  everything: scenes where there are none, gates, training, export
    python -m training.nano gate NAME        one gate: overfit, parity, bank, figures
    python -m training.nano export           weights of the last checkpoint
    python -m training.nano curves           the log as a picture
    python -m training.nano pictures         train on these masks, beginning from --init
    python -m training.nano teach PICTURES   a teacher's masks of real pictures, see training/nano/teach.py
    python -m training.nano agree WEIGHTS    how well single frames are segmented, see training/nano/agree.py

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

from . import agree, teach
from .augment import OPENCLIPART
from .curves import draw_curves
from .data import Sources
from .export import export
from .gates import GATES, has_passed, pass_gate
from .train import PICTURE_RATE, Trainer, picture_stages, stages

RENDERED = {
    "train": (2400, 16, "320x240", 12),
    "val": (24, 24, "320x240", 12),
    "test": (24, 100, "640x480", 15),
}


def main() -> None:
    if sys.argv[1:2] in (["teach"], ["agree"]):
        return {"teach": teach.main, "agree": agree.main}[sys.argv[1]](sys.argv[2:])
    args = _arguments()
    set_up_cpu(args.threads)
    with errors_in_one_line():
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    if args.command == "gate":
        return 0 if _gate(args.name, args) else 1
    if args.command == "curves":
        draw_curves(args.output / "log.jsonl", args.output / "curves.png")
    elif args.command == "export":
        _export(args)
    else:
        return _everything(args)
    return 0


def _everything(args: argparse.Namespace) -> int:
    trainer = Trainer(args.output, choose_device(args.device), args.init, args.mixed, args.seed)
    if args.command == "pictures":
        return _pictures(trainer, args)
    for split in RENDERED:
        _render(split, args)
    for name in ("overfit", "parity"):
        if not (has_passed(name, args.output) or _gate(name, args)):
            return 1
    sources = Sources(args.scenes / "train", args.output / "cache", cutouts=args.cutouts, videos=args.videos)
    plan = stages(args.frame_minutes, args.clip_minutes)
    trainer.run(plan[:2], sources, args.workers)
    _export(args)
    if not _gate("bank", args):
        return 1
    trainer.run(plan, sources, args.workers)
    _export(args)
    draw_curves(args.output / "log.jsonl", args.output / "curves.png")
    return 0 if _gate("figures", args) else 1


def _pictures(trainer: Trainer, args: argparse.Namespace) -> int:
    """Train on what a teacher has labelled, with clips beside it."""
    _render("train", args)
    sources = Sources(
        args.scenes / "train", args.output / "cache", cutouts=args.cutouts, taught=args.taught / "train"
    )
    trainer.run(picture_stages(args.picture_minutes, args.picture_rate), sources, args.workers)
    _export(args)
    return 0


def _render(split: str, args: argparse.Namespace) -> None:
    """Scenes of a split, where there are none."""
    folder = args.scenes / split
    if (folder / "Clips").is_dir():
        return
    names = ("split", "clips", "frames", "size", "fps", "workers")
    options = zip(names, (split, *RENDERED[split], args.workers), strict=True)
    words = [word for name, value in options for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, "-m", "tools.scenes", *words, "-o", str(folder)], check=True)


def _gate(name: str, args: argparse.Namespace) -> bool:
    finding = pass_gate(name, args.output, args.scenes)
    print(f"gate {name} {'passed' if finding.passed else 'NOT passed'}: {finding.text}", flush=True)
    return finding.passed


def _export(args: argparse.Namespace) -> None:
    beside = [folder / "last.pt" for folder in args.beside]
    start = args.init if args.halfway else None
    path = export(args.output / "last.pt", NANO if args.install else args.output / "export", beside, start)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, "python -m training.nano")
    parser.add_argument("command", nargs="?", choices=("gate", "export", "curves", "pictures"))
    parser.add_argument("name", nargs="?", choices=tuple(GATES), default="overfit", help="of a gate")
    parser.add_argument("--scenes", type=Path, default=Path("out/scenes"), help="of train, val and test")
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

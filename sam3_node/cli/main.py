"""The door: `sam3-node <verb>`. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import Sam3NodeError
from ..settings import Settings, load_settings, old_names, options
from . import commands, engine, replay

Verb = Callable[[argparse.Namespace, Settings], int | None]

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code is 0, 2 for an error of ours (on stderr), 130 after Ctrl-C."""
    args = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        overrides = {name: value for name, value in vars(args).items() if "." in name}
        code = args.run(args, load_settings(args.profile, overrides))
        sys.stdout.flush()
        return code or 0
    except Sam3NodeError as error:
        print("sam3-node: error:", error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read our output has gone; the interpreter's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Help(argparse.HelpFormatter):
    """Settings are listed below, but not in the usage line, which they would fill."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if "." not in action.dest or not action.option_strings]
        super().add_usage(usage, shown, groups, prefix)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sam3-node",
        description="Camera frames in over ZeroMQ, tracked instance masks out.",
        epilog="Every verb takes --profile FILE.toml and one option for each setting: sam3-node run --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sam3-node {_version()}")
    parsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    common = _settings_parser()
    _verb(
        parsers,
        common,
        "run",
        commands.run,
        "the node: track objects on the frames of cameras, publish masks",
    )
    camera = _verb(
        parsers, common, "camera", commands.camera, "publish frames: scene:tabletop, bag:FILE, webcam:0 …"
    )
    camera.add_argument(
        "camera.source", metavar="SOURCE", nargs="?", default=argparse.SUPPRESS, help="what to publish"
    )
    watch = _verb(parsers, common, "watch", commands.watch, "masks as a table in the terminal")
    watch.add_argument(
        "--overlay", type=Path, metavar="OUT.mp4", help="write frames with masks drawn on them"
    )
    watch.add_argument("--frames", type=int, default=0, metavar="N", help="stop after N frames; 0 never")
    record = _verb(
        parsers, common, "record", commands.record, "write frames, masks and events into MCAP files"
    )
    record.add_argument(
        "record.out",
        metavar="OUT",
        nargs="?",
        default=argparse.SUPPRESS,
        help="a file NAME.mcap, or a folder",
    )
    _add_object_verbs(parsers, common)
    segment = _verb(
        parsers, common, "segment", commands.segment, "a mask on a recent frame, without tracking"
    )
    _add_prompt(segment)
    segment.add_argument("--out", type=Path, metavar="MASK.png", help="write the mask, 255 inside")
    prompt = _verb(parsers, common, "prompt", commands.set_prompts, "name what to look for, live")
    _add_names(prompt)
    demo = _verb(
        parsers,
        common,
        "demo",
        commands.demo,
        "camera, node and watcher on this machine, on a recorded scene",
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="where results go")
    demo.add_argument(
        "--seconds", type=float, metavar="S", help="how long to play; the recording once if left out"
    )
    _verb(parsers, common, "doctor", commands.doctor, "what is installed, what the GPU can do, what to fix")
    _add_node_verbs(parsers, common)
    _add_vocabulary_verbs(parsers, common)
    _add_weights_verbs(parsers, common)
    engine.add_engine_verbs(parsers, lambda to, *what: _verb(to, common, *what))
    engine.add_calibrate_verbs(parsers, lambda to, *what: _verb(to, common, *what))
    replay.add_replay_verb(parsers, lambda to, *what: _verb(to, common, *what))
    return parser


def _add_names(parser: argparse.ArgumentParser) -> None:
    """What to look for, with limits."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help='such as "red mug"; nothing is looked for if none'
    )
    parser.add_argument(
        "--score",
        type=_limit(float),
        action="append",
        default=[],
        metavar="NAME=SCORE",
        help="detections of this name begin an object from this score on; again for more",
    )
    parser.add_argument(
        "--most",
        type=_limit(int),
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="at most so many objects of this name; again for more",
    )


def _limit(number: Callable[[str], float]) -> Callable[[str], tuple[str, float]]:
    def limit(text: str) -> tuple[str, float]:
        name, equals, value = text.rpartition("=")
        if not equals or not name:
            raise argparse.ArgumentTypeError(f"expected NAME=NUMBER, found {text!r}")
        return name, number(value)

    return limit


def _add_node_verbs(parsers: Any, common: argparse.ArgumentParser) -> None:
    _verb(parsers, common, "status", commands.status, "the state of a running node, as JSON")
    _verb(parsers, common, "pause", commands.pause, "let a running node pass over frames until resume")
    _verb(parsers, common, "resume", commands.resume, "let a paused node go on")
    reset = _verb(parsers, common, "reset", commands.reset, "forget all objects, of one camera or of all")
    reset.add_argument("--camera", metavar="NAME", help="forget those of this camera alone")


def _add_vocabulary_verbs(parsers: Any, common: argparse.ArgumentParser) -> None:
    text = "phrases and their vectors, for a node without a text encoder"
    vocabulary = parsers.add_parser("vocabulary", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    build = _verb(vocabulary, common, "build", commands.vocabulary_build, "write a vocabulary file")
    build.add_argument(
        "phrases", nargs="*", metavar="PHRASE", help='such as "red mug"; all of --from if none'
    )
    build.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to write; a file that is there is replaced, once the new one is whole",
    )
    build.add_argument(
        "--phrases", type=Path, dest="phrase_file", metavar="FILE.txt", help="more phrases, one a line"
    )
    build.add_argument(
        "--from",
        type=Path,
        dest="sources",
        action="append",
        default=[],
        metavar="FILE",
        help="take vectors from this vocabulary, or .json map {phrase: [numbers]}; again for more",
    )
    build.add_argument(
        "--encoder",
        type=Path,
        metavar="FOLDER",
        help="encode the others with this CLIP, in transformers' layout",
    )
    build.add_argument(
        "--model",
        metavar="NAME",
        help="what made the vectors, such as openai/clip-vit-base-patch32; needed for .json, "
        "the folder's name for --encoder if left out",
    )
    listed = _verb(vocabulary, common, "list", commands.vocabulary_list, "what is in a vocabulary file")
    listed.add_argument("file", type=Path, metavar="FILE")


def _add_weights_verbs(parsers: Any, common: argparse.ArgumentParser) -> None:
    text = "checkpoints of models"
    weights = parsers.add_parser("weights", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    convert = _verb(
        weights,
        common,
        "convert",
        commands.weights_convert,
        "a YOLO-World checkpoint as a folder of safetensors",
    )
    convert.add_argument("file", type=Path, metavar="FILE.pt", help="such as yolov8s-worldv2.pt")
    convert.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FOLDER", help="where config.json and weights go"
    )


def _add_object_verbs(parsers: Any, common: argparse.ArgumentParser) -> None:
    text = "add, correct, remove and list tracked objects, live"
    objects = parsers.add_parser("object", help=text, description=text).add_subparsers(
        metavar="VERB", required=True
    )
    add = _verb(objects, common, "add", commands.object_add, "track an object; prints its id")
    add.add_argument("--label", help="what to call it")
    refine = _verb(objects, common, "refine", commands.object_refine, "correct an object")
    remove = _verb(objects, common, "remove", commands.object_remove, "stop tracking an object")
    for parser in (refine, remove):
        parser.add_argument("id", type=int, metavar="ID")
    _add_prompt(add, "the next that comes")
    _add_prompt(refine)
    for parser in (add, refine):
        parser.add_argument(
            "--mask", type=Path, metavar="FILE.png", help="an image of the frame's size, non-zero inside"
        )
    listed = _verb(objects, common, "list", commands.object_list, "list the objects")
    for parser in (remove, listed):
        parser.add_argument("--camera", metavar="NAME", help="which camera, where the node serves several")


def _verb(
    parsers: Any, common: argparse.ArgumentParser, name: str, run: Verb, text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parsers.add_parser(
        name, parents=[common], help=text, description=text, allow_abbrev=False, formatter_class=_Help
    )
    parser.set_defaults(run=run)
    return parser


def _add_prompt(parser: argparse.ArgumentParser, otherwise: str = "the latest") -> None:
    """Where an object is, in pixels of the frame."""
    parser.add_argument(
        "--point", type=_numbers(2), action="append", default=[], metavar="X,Y", help="inside it"
    )
    parser.add_argument(
        "--exclude", type=_numbers(2), action="append", default=[], metavar="X,Y", help="outside it"
    )
    parser.add_argument("--box", type=_numbers(4), metavar="X0,Y0,X1,Y1", help="around it")
    parser.add_argument(
        "--seq", type=int, metavar="N", help=f"the recent frame that is meant; else {otherwise}"
    )
    parser.add_argument("--camera", metavar="NAME", help="which camera, where the node serves several")


def _numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    def numbers(text: str) -> tuple[float, ...]:
        values = tuple(float(part) for part in text.split(","))
        if len(values) != count:
            raise argparse.ArgumentTypeError(f"expected {count} numbers with commas between, found {text!r}")
        return values

    return numbers


def _settings_parser() -> argparse.ArgumentParser:
    """--profile, and an option for each field of the settings."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", type=Path, metavar="FILE.toml", help="settings to begin with")
    groups: dict[str, Any] = {}
    for option in options():
        section = option.name.split(".")[0]
        if not option.is_text:
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(f"{section} settings")
        groups[section].add_argument(
            f"--{option.name}",
            default=argparse.SUPPRESS,
            metavar="{" + ",".join(option.choices) + "}"
            if option.choices
            else option.name.split(".")[1].upper(),
            help=f"{option.help} [{option.default}]".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if option.is_flag else {}),
        )
    for name in old_names():
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return metadata.version("sam3-node")
    except metadata.PackageNotFoundError:
        return "(not installed)"

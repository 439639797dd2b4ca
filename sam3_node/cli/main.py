"""Command-line entry point: `sam3-node COMMAND`. Each command imports its heavy dependencies when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from ..errors import DeviceError, NoAnswerError, Sam3NodeError
from ..processes.logs import discard_stdout, install_log_handler
from ..processes.notify import TRY_AGAIN, Watchdog, is_supervised
from ..processes.signals import INTERRUPTED
from ..settings import load_settings
from ..types import Priority
from . import bridge, calibrate, commands, engine, keys, replay, snapshot
from .commands import AddCommand
from .parser import (
    DEVICE_FAILED,
    FAILED,
    NO_ANSWER,
    CommandParser,
    add_command,
    add_command_group,
    add_timeout,
    make_settings_parser,
    parse_limit,
    parse_numbers,
    parse_timeout,
)
from .progress import printable

EXIT_CODES: dict[type[Sam3NodeError], int] = {NoAnswerError: NO_ANSWER, DeviceError: DEVICE_FAILED}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Sam3NodeErrors are printed on stderr."""
    supervised, Watchdog.began = is_supervised(), False
    try:
        args = _parser().parse(arguments)
        handler = install_log_handler()
        overrides = {name: value for name, value in vars(args).items() if "." in name}
        settings = load_settings(args.profile, overrides)
        handler.configure(settings.logging.format, settings.logging.limit)
        code = args.run(args, settings)
        sys.stdout.flush()
        return code or 0
    except Sam3NodeError as error:
        print("sam3-node: error:", printable(str(error), line_feeds=True), file=sys.stderr)
        code = EXIT_CODES.get(type(error), FAILED)
        return TRY_AGAIN if code == FAILED and supervised and (error.may_pass or Watchdog.began) else code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of the output has gone; the interpreter's flush at exit must not raise again
        discard_stdout()
        return 0
    except OSError as error:  # of a file that vanished meanwhile, or a folder without rights
        place = f"{error.filename}: " if error.filename else ""
        print(f"sam3-node: error: {printable(place)}{error.strerror or error}", file=sys.stderr)
        return FAILED


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sam3-node",
        description="Track objects: receive camera frames over ZeroMQ, publish instance masks.",
        epilog="Every command takes --profile FILE.toml and one option for each setting: "
        "sam3-node run --help-settings",
    )
    parser.add_argument("--version", action="version", version=f"sam3-node {_read_version()}")
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = partial(add_command, make_settings_parser())
    _add_stream_commands(parsers, add)
    _add_object_commands(parsers, add)
    _add_prompt_commands(parsers, add)
    snapshot.add_snapshot_commands(parsers, add)
    _add_console_command(parsers, add)
    bridge.add_bridge_commands(parsers, add)
    _add_demo_commands(parsers, add)
    _add_node_commands(parsers, add)
    keys.add_keys_commands(parsers, add)
    _add_vocabulary_commands(parsers, add)
    _add_weights_commands(parsers, add)
    engine.add_engine_commands(parsers, add)
    _add_calibrate_commands(parsers, add)
    replay.add_replay_command(parsers, add)
    return parser


def _add_stream_commands(parsers: Any, add: AddCommand) -> None:
    run = add(parsers, "run", commands.run, "run the node: track objects on camera frames and publish masks")
    run.add_argument(
        "--restore-from",
        metavar="FILE|ENDPOINT",
        help="snapshot to continue from, or control endpoint of the node to take over from, such as tcp://old:5552",
    )
    _add_camera_command(parsers, add)
    watch = add(parsers, "watch", commands.watch, "show masks as a table in the terminal")
    watch.add_argument(
        "--overlay", type=Path, metavar="OUT.mp4", help="video file for the frames with their masks drawn"
    )
    watch.add_argument(
        "--frames", type=int, default=0, metavar="N", help="stop after N mask messages; 0 never stops"
    )
    record = add(parsers, "record", commands.record, "record frames, masks and events to MCAP files")
    record.add_argument(
        "record.out",
        metavar="OUT",
        nargs="?",
        default=argparse.SUPPRESS,
        help="file NAME.mcap, or a folder for recordings",
    )
    record.add_argument(
        "--ring",
        dest="record.ring_s",
        metavar="S",
        default=argparse.SUPPRESS,
        help="keep the last S seconds in memory, and write them only at SIGUSR1 or Enter",
    )
    record.add_argument(
        "--after",
        dest="record.after_s",
        metavar="S",
        default=argparse.SUPPRESS,
        help="with --ring: write S seconds after the trigger, too [10]",
    )


def _add_console_command(parsers: Any, add: AddCommand) -> None:
    console = add(
        parsers,
        "console",
        commands.console,
        "serve a web page that shows masks live, and sends clicks and names",
    )
    console.add_argument(
        "--recording", type=Path, metavar="FILE.mcap", help="play a recording instead of the live node"
    )
    console.add_argument(
        "--against",
        type=Path,
        metavar="FILE.mcap",
        help="with --recording: another result of it to compare with, a file of masks or a replay's folder",
    )


def _add_camera_command(parsers: Any, add: AddCommand) -> None:
    camera = add(
        parsers,
        "camera",
        commands.camera,
        "publish frames of scene:tabletop, bag:FILE, realsense, webcam:0 ..., or list the sources",
    )
    camera.add_argument(
        "camera.source",
        metavar="SOURCE",
        nargs="?",
        default=argparse.SUPPRESS,
        help="source of the frames; list: print the cameras of this machine and the recordings of FOLDER",
    )
    camera.add_argument(
        "folder", type=Path, metavar="FOLDER", nargs="?", help="with list: folder of recordings [.]"
    )
    camera.add_argument(
        "--dialect",
        dest="camera.dialect",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="read another project's camera server at SOURCE: groot, lerobot, imagezmq, imagezmq-hub, jpeg",
    )


def _add_object_commands(parsers: Any, add: AddCommand) -> None:
    objects = add_command_group(
        parsers,
        "object",
        "add, correct, rename, remove and list the tracked objects of a running node, and print their points",
    )
    add_object = add(objects, "add", commands.object_add, "track a new object and print its id")
    add_object.add_argument("--label", help="name of the object")
    add_object.add_argument(
        "--priority", choices=get_args(Priority), help="low: track it on every second frame under load"
    )
    refine = add(objects, "refine", commands.object_refine, "correct the mask of an object")
    remove = add(objects, "remove", commands.object_remove, "stop tracking an object")
    rename = add(objects, "rename", commands.object_rename, "change the label of an object")
    points = add(objects, "points", commands.object_points, "print the points of an object's visible surface")
    points.add_argument("--count", type=int, default=1000, help="number of points [1000], at most 10,000")
    for parser in (refine, remove, rename, points):
        parser.add_argument("id", type=int, metavar="ID", help="id of the object")
    _add_prompt_options(add_object, "the next frame that arrives")
    _add_prompt_options(refine, "the latest frame")
    for parser in (add_object, refine):
        parser.add_argument(
            "--mask",
            type=Path,
            metavar="FILE.png",
            help="image of the size of the frame; pixels other than 0 are inside the object",
        )
    list_objects = add(objects, "list", commands.object_list, "list the tracked objects")
    rename.add_argument("label", metavar="LABEL", help="new label")
    for parser in (remove, rename, list_objects, points):
        _add_camera_option(parser)
    for parser in (add_object, refine, remove, rename, list_objects, points):
        add_timeout(parser)


def _add_prompt_commands(parsers: Any, add: AddCommand) -> None:
    segment = add(parsers, "segment", commands.segment, "segment a recent frame once, without tracking")
    _add_prompt_options(segment, "the latest frame")
    segment.add_argument(
        "--out", type=Path, metavar="MASK.png", help="image file for the mask, with 255 inside"
    )
    add_timeout(segment)
    everything = add(
        parsers,
        "segment-everything",
        commands.segment_everything,
        "segment everything on a recent frame once, without prompts and tracking",
    )
    everything.add_argument("--grid", type=int, metavar="N", help="points along each side, 1 to 32 [16]")
    everything.add_argument(
        "--min-iou", type=float, metavar="P", help="lowest IoU predicted for a mask, 0 to 1 [the model's own]"
    )
    everything.add_argument(
        "--min-stability",
        type=float,
        metavar="P",
        help="lowest stability of a mask, 0 to 1 [the model's own]",
    )
    everything.add_argument("--most", type=int, metavar="N", help="largest number of masks, 1 to 256 [100]")
    everything.add_argument(
        "--seq", type=int, metavar="N", help="seq of the frame; default: the latest frame"
    )
    everything.add_argument(
        "--out",
        type=Path,
        metavar="LABELS.png",
        help="16-bit image: each pixel has the number of the smallest mask around it, 0 outside all of them",
    )
    _add_camera_option(everything)
    add_timeout(everything)
    _add_names_command(parsers, add)


def _add_names_command(parsers: Any, add: AddCommand) -> None:
    prompt = add(parsers, "prompt", commands.set_prompts, "set the names of objects to look for")
    prompt.add_argument(
        "names", nargs="*", metavar="NAME", help='name such as "red mug"; without names the search stops'
    )
    prompt.add_argument(
        "--score",
        type=parse_limit(float),
        action="append",
        default=[],
        metavar="NAME=SCORE",
        help="minimum score of a detection to start an object of this name; may be repeated",
    )
    prompt.add_argument(
        "--most",
        type=parse_limit(int),
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="maximum number of objects of this name; may be repeated",
    )
    prompt.add_argument(
        "--low",
        action="append",
        default=[],
        metavar="NAME",
        help="low priority: under load, track objects of this name on every second frame; may be repeated",
    )
    add_timeout(prompt)


def _add_demo_commands(parsers: Any, add: AddCommand) -> None:
    demo = add(
        parsers, "demo", commands.demo, "run camera, node and watcher on this machine, on a recorded scene"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="folder for the results"
    )
    demo.add_argument(
        "--seconds", type=parse_timeout, metavar="S", help="duration; default: play the recording once"
    )
    add(parsers, "doctor", commands.doctor, "check the installation and the GPU, and name what to fix")


def _add_node_commands(parsers: Any, add: AddCommand) -> None:
    status = add(parsers, "status", commands.status, "print the status of a running node as JSON")
    pause = add(parsers, "pause", commands.pause, "make a running node skip frames until resume")
    resume = add(parsers, "resume", commands.resume, "make a paused node process frames again")
    reset = add(parsers, "reset", commands.reset, "remove all objects, of one camera or of all")
    reset.add_argument("--camera", metavar="NAME", help="remove only the objects of this camera")
    for parser in (status, pause, resume, reset):
        add_timeout(parser)


def _add_vocabulary_commands(parsers: Any, add: AddCommand) -> None:
    vocabulary = add_command_group(
        parsers, "vocabulary", "build and list files of phrase vectors, for nodes without a text encoder"
    )
    build = add(vocabulary, "build", commands.vocabulary_build, "write a vocabulary file")
    build.add_argument(
        "phrases",
        nargs="*",
        metavar="PHRASE",
        help='phrase such as "red mug"; default: all phrases of --from',
    )
    build.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="vocabulary file to write; an existing file is replaced after the new one is complete",
    )
    build.add_argument(
        "--phrases",
        type=Path,
        dest="phrase_file",
        metavar="FILE.txt",
        help="text file with more phrases, one on each line",
    )
    build.add_argument(
        "--from",
        type=Path,
        dest="sources",
        action="append",
        default=[],
        metavar="FILE",
        help="take vectors from this vocabulary or .json map {phrase: [numbers]}; may be repeated",
    )
    build.add_argument(
        "--encoder",
        type=Path,
        metavar="FOLDER",
        help="CLIP text encoder, in the layout of transformers, for phrases without a vector",
    )
    build.add_argument(
        "--model",
        metavar="NAME",
        help="model that made the vectors, such as openai/clip-vit-base-patch32; required for .json; "
        "default: the name of the --encoder folder",
    )
    list_phrases = add(vocabulary, "list", commands.vocabulary_list, "list the phrases of a vocabulary file")
    list_phrases.add_argument("file", type=Path, metavar="FILE", help="vocabulary file to read")


def _add_weights_commands(parsers: Any, add: AddCommand) -> None:
    weights = add_command_group(parsers, "weights", "convert checkpoints of models")
    convert = add(
        weights,
        "convert",
        commands.weights_convert,
        "convert a YOLO-World checkpoint to a folder of safetensors",
    )
    convert.add_argument("file", type=Path, metavar="FILE.pt", help="checkpoint such as yolov8s-worldv2.pt")
    convert.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder for config.json and the weights",
    )


def _add_calibrate_commands(parsers: Any, add: AddCommand) -> None:
    group = add_command_group(
        parsers, "calibrate", "calibrate a camera and its place on a robot, or the scales of FP8 engines"
    )
    calibrate.add_calibration_commands(group, add)
    engine.add_fp8_command(group, add)


def _add_prompt_options(parser: argparse.ArgumentParser, default_frame: str) -> None:
    """Add the options that mark an object on a frame, in pixels."""
    parser.add_argument(
        "--point",
        type=parse_numbers(2),
        action="append",
        default=[],
        metavar="X,Y",
        help="point inside the object; may be repeated",
    )
    parser.add_argument(
        "--exclude",
        type=parse_numbers(2),
        action="append",
        default=[],
        metavar="X,Y",
        help="point outside the object; may be repeated",
    )
    parser.add_argument("--box", type=parse_numbers(4), metavar="X0,Y0,X1,Y1", help="box around the object")
    parser.add_argument(
        "--seq", type=int, metavar="N", help=f"number of a recent frame; default: {default_frame}"
    )
    _add_camera_option(parser)


def _add_camera_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--camera", metavar="NAME", help="camera to use; optional if the node serves one camera"
    )


def _read_version() -> str:
    try:
        return metadata.version("sam3-node")
    except metadata.PackageNotFoundError:
        return "(not installed)"

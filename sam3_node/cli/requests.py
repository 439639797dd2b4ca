"""Commands that send requests to a running node: objects, prompts, snapshots and status; sets of prompts in files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..errors import OutputError, RequestError, SettingsError, WireError, did_you_mean, request_id
from ..files import explain_os_error, make_folder, prepare_output, safe_file_name, write_output
from ..processes.signals import WaitingNotice, print_notice
from ..settings import Settings
from ..types import Mask, Priority
from ..wire.operations import OPERATIONS
from .parser import Command, CommandParser, Commands, parse_box, parse_named, parse_point
from .progress import printable

if TYPE_CHECKING:
    from ..client import PerceptionClient, Segmentation

SETS_FOLDER = Path("prompts")
"""Folder of prompt sets, beside the profile or in the working directory."""
SUFFIX = ".json"
MAX_SET_BYTES = 1 << 20
FRAME_SIZE_MS = 500
"""Longest time to wait for masks before a box is sent."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_objects(commands)
    _add_segment(commands)
    _add_segment_everything(commands)
    _add_prompt(commands)
    _add_exemplar(commands)
    _add_snapshots(commands)
    _add(commands, "status", status)
    pause, resume = _asking(lambda client, _: client.pause()), _asking(lambda client, _: client.resume())
    _add(commands, "pause", pause, "make a running node skip frames until resume")
    _add(commands, "resume", resume, "make a paused node process frames again")
    reset = _asking(lambda client, args: client.reset(camera=args.camera))
    parser = _add(commands, "reset", reset, "remove all objects, of one camera or of all")
    parser.add("--camera NAME", "remove only the objects of this camera")


def _add(
    commands: Commands, name: str, run: Command, text: str = "", has_camera: bool = False
) -> CommandParser:
    """Add a command that sends a request, with the options of such commands."""
    parser = commands.add(name, run, text)
    if has_camera:
        parser.add("--camera NAME", "camera to use; optional if the node serves one camera")
    parser.add_timeout()
    parser.add("--request-id ID", "its id in logs, events and errors")
    return parser


@contextmanager
def connect(args: Namespace, settings: Settings) -> Iterator[PerceptionClient]:
    """Connect to the node. While a request waits for its answer, a thread says on stderr why."""
    from ..client import PerceptionClient
    from ..transport import Security
    from .watch import NodeProbe

    transport = settings.transport
    with (
        request_id(getattr(args, "request_id", None)),
        PerceptionClient(
            transport.masks,
            transport.control,
            timeout_ms=round(args.timeout * 1000),
            security=Security.from_settings(transport),
        ) as client,
        NodeProbe(settings) as probe,
        WaitingNotice(probe.explain_answer),
    ):
        yield client


def _asking(ask: Callable[[PerceptionClient, Namespace], object]) -> Command:
    """Return a command that sends one request and prints nothing."""

    def command(args: Namespace, settings: Settings) -> None:
        with connect(args, settings) as client:
            ask(client, args)

    return command


def _report_idle(settings: Settings) -> None:
    """Say on stderr why the node does not act on a request yet, such as that it is paused."""
    from .watch import NodeProbe

    with NodeProbe(settings) as probe:
        if reason := probe.explain_frames():
            print_notice(f"nothing happens yet: {reason}")


def status(args: Namespace, settings: Settings) -> None:
    """Print the status of a running node as JSON."""
    with connect(args, settings) as client:
        print(json.dumps(client.status(), indent=2))


def _add_objects(commands: Commands) -> None:
    objects = commands.add_group(
        "object",
        "add, correct, rename, remove and list the tracked objects of a running node, and print their points",
    )
    added = _add(objects, "add", object_add, has_camera=True)
    added.add("--label", "name of the object")
    text = "low: track it on every second frame under load"
    added.add("--priority", text, choices=get_args(Priority))
    added.add("--choice N", "begin with this mask of `segment --multimask`, from 0", int)
    refine = _add(objects, "refine", object_refine, has_camera=True)
    ask = _asking(lambda client, args: client.remove_object(args.id, camera=args.camera))
    remove = _add(objects, "remove", ask, "stop tracking an object", True)
    ask = _asking(lambda client, args: client.rename_object(args.id, args.label, camera=args.camera))
    rename = _add(objects, "rename", ask, "change the label of an object", True)
    points = _add(objects, "points", object_points, has_camera=True)
    points.add("--count", "number of points [1000], at most 10,000", int, 1000)
    for parser in (refine, remove, rename, points):
        parser.add("id ID", "id of the object", int)
    rename.add("label LABEL", "new label")
    _add_prompt_options(added, "the next frame that arrives")
    _add_prompt_options(refine, "the latest frame")
    for parser in (added, refine):
        text = "image of the size of the frame; pixels other than 0 are inside the object"
        parser.add_path("--mask FILE.png", text)
    _add(objects, "list", object_list, has_camera=True)


def object_add(args: Namespace, settings: Settings) -> None:
    """Track a new object and print its id.

    Track an object and print its id alone on a line, so that scripts can read it.
    """
    with connect(args, settings) as client:
        prompt = {**_make_prompt(args), "mask": _read_mask(args.mask), "choice": args.choice}
        if args.box and args.seq is None:
            client.latest(FRAME_SIZE_MS)  # masks tell the size of the frame, and so whether it holds the box
        print(client.add_object(**prompt, label=args.label, priority=args.priority).id)
    if args.seq is None:
        _report_idle(settings)


def object_refine(args: Namespace, settings: Settings) -> None:
    """Correct the mask of an object."""
    with connect(args, settings) as client:
        print(_describe(client.refine_object(args.id, **_make_prompt(args), mask=_read_mask(args.mask))))


def object_list(args: Namespace, settings: Settings) -> None:
    """List the tracked objects."""
    with connect(args, settings) as client:
        objects = client.list_objects(camera=args.camera)
    for tracked in objects:
        unseen = f"  unseen for {tracked.frames_since_seen}" if tracked.frames_since_seen else ""
        print(
            f"{printable(tracked.camera):<12} {tracked.id:>4}  {printable(tracked.label):<24} {tracked.state:<10} "
            f"score {tracked.score:.2f}  age {tracked.age}{unseen}"
        )


def object_points(args: Namespace, settings: Settings) -> None:
    """Print the points of an object's visible surface."""
    with connect(args, settings) as client:
        surface = client.points(args.id, count=args.count, camera=args.camera)
    print(f"# frame {printable(surface.frame)}, seq {surface.seq}: x y z in metres")
    for point in surface.points_m.tolist():
        print(*(f"{value:.4f}" for value in point))


def _add_segment(commands: Commands) -> None:
    parser = _add(commands, "segment", segment, has_camera=True)
    _add_prompt_options(parser, "the latest frame")
    parser.add_path("--out MASK.png", "image file for the mask, with 255 inside")
    parser.add_flag("--multimask", "list all masks that may be meant: a part, a larger one, the whole")


def segment(args: Namespace, settings: Settings) -> None:
    """Segment a recent frame once, without tracking.

    Segment a recent frame once, print a line about the mask, and write it if --out is given.
    """
    if args.out is not None:
        prepare_output(args.out)
    with connect(args, settings) as client:
        segmentation = client.segment(**_make_prompt(args), multimask=args.multimask)
    print(_describe(segmentation))
    for number, candidate in enumerate(segmentation.candidates):
        print(f"{number:>3}  {_describe(candidate)}")
    if args.out is not None:
        _write_image(args.out, segmentation.mask.full().astype("uint8") * 255)


def _add_segment_everything(commands: Commands) -> None:
    parser = _add(commands, "segment-everything", segment_everything, has_camera=True)
    parser.add("--grid N", "points along each side, 1 to 32 [16]", int)
    parser.add("--min-iou P", "lowest IoU predicted for a mask, 0 to 1 [the model's own]", float)
    parser.add("--min-stability P", "lowest stability of a mask, 0 to 1 [the model's own]", float)
    parser.add("--most N", "largest number of masks, 1 to 256 [100]", int)
    parser.add("--seq N", "seq of the frame; default: the latest frame", int)
    parser.add_path(
        "--out LABELS.png",
        "16-bit image: each pixel has the number of the smallest mask around it, 0 outside all of them",
    )


def segment_everything(args: Namespace, settings: Settings) -> None:
    """Segment everything on a recent frame once, without prompts and tracking.

    Segment everything on a recent frame once, print a line about each mask, and write them if --out is given.
    """
    if args.out is not None:
        prepare_output(args.out)
    with connect(args, settings) as client:
        everything = client.segment_everything(
            grid=args.grid,
            min_iou=args.min_iou,
            min_stability=args.min_stability,
            most=args.most,
            seq=args.seq,
            camera=args.camera,
        )
    for number, segmentation in enumerate(everything, start=1):
        print(f"{number:>3}  {_describe(segmentation)}")
    if not everything:
        print(everything.note or "nothing is sure enough; a larger --grid may find smaller things")
    elif args.out is not None:
        _write_image(args.out, _label_image([segmentation.mask for segmentation in everything]))


def _add_prompt(commands: Commands) -> None:
    parser = _add(commands, "prompt", set_prompts)
    parser.add("names NAME", 'name such as "red mug"; without names the search stops', nargs="*")
    text = "minimum score of a detection to start an object of this name"
    parser.add_repeated("--score NAME=SCORE", text, parse_named(float))
    parser.add_repeated("--most NAME=COUNT", "maximum number of objects of this name", parse_named(int))
    text = "low priority: under load, track objects of this name on every second frame"
    parser.add_repeated("--low NAME", text)


def set_prompts(args: Namespace, settings: Settings) -> None:
    """Set the names of objects to look for."""
    with connect(args, settings) as client:
        low: dict[str, Priority] = dict.fromkeys(args.low, "low")
        client.set_prompts(args.names, scores=dict(args.score), most=dict(args.most), priorities=low)
    _report_idle(settings)


def _add_exemplar(commands: Commands) -> None:
    parser = _add(commands, "exemplar", add_exemplar, has_camera=True)
    parser.add("name NAME", "name of what is found")
    parser.add_repeated("--box X0,Y0,X1,Y1", "box around a thing that is meant", parse_box)
    parser.add_repeated("--exclude X0,Y0,X1,Y1", "box around a thing that is not", parse_box)
    parser.add("--text WORDS", "what is meant, in words, beside the boxes")
    parser.add_path("--photo FILE", "JPEG or PNG that the boxes are on; default: a frame")
    parser.add("--seq N", "number of a recent frame; default: the latest frame", int)


def add_exemplar(args: Namespace, settings: Settings) -> None:
    """Look for all that is like boxes on a frame or a photo."""
    with explain_os_error(SettingsError, f"cannot read {args.photo}"):
        photo = args.photo and args.photo.read_bytes()
    boxes, labels = [*args.box, *args.exclude], [1] * len(args.box) + [0] * len(args.exclude)
    with connect(args, settings) as client:
        client.add_exemplar(
            args.name, boxes, labels, text=args.text, photo=photo, seq=args.seq, camera=args.camera
        )
    _report_idle(settings)


def _add_snapshots(commands: Commands) -> None:
    snapshots = commands.add_group("snapshot", "keep and restore what a running node tracks")
    save = _add(snapshots, "save", snapshot_save)
    ask = _asking(lambda client, args: client.restore(args.name))
    restore = _add(snapshots, "restore", ask, "track again what was saved; object ids begin again")
    for parser in (save, restore):
        parser.add("name NAME", "name of the snapshot")
    _add(snapshots, "fetch", snapshot_fetch).add_path("out FILE", "file to write")
    sets = commands.add_group("prompts", "keep and use sets of prompts by name")
    keep = _add(sets, "save", prompts_save)
    load = _add(sets, "load", prompts_load)
    for parser in (keep, load):
        parser.add("name NAME", "name of the set")
    text = f"folder of the sets; default: {SETS_FOLDER}/ beside --profile, or in the working directory"
    for parser in (keep, load, sets.add("list", prompts_list)):
        parser.add_path("--folder FOLDER", text)


def snapshot_save(args: Namespace, settings: Settings) -> None:
    """Write a snapshot in the node's folder of snapshot.path."""
    with connect(args, settings) as client:
        saved = client.snapshot(args.name)
    print(f"{args.name}: {saved.size} bytes, sha256 {saved.sha256}")


def snapshot_fetch(args: Namespace, settings: Settings) -> None:
    """Copy a snapshot to a file, for sam3-node run --restore-from."""
    prepare_output(args.out)
    with connect(args, settings) as client:
        data = client.fetch_snapshot()
    write_output(args.out, data)
    print(f"{args.out}: {len(data)} bytes")


def prompts_save(args: Namespace, settings: Settings) -> None:
    """Keep the prompts of the running node, with their limits."""
    with connect(args, settings) as client:
        status = client.status()
    if shown := status.get("exemplars"):
        raise SettingsError(
            f"expected names alone, found exemplars of {', '.join(map(printable, shown))}; use snapshot save"
        )
    content = {"prompts": status["prompts"], **status["prompt_limits"]}
    path = _path_of(args)
    make_folder(path.parent)
    write_output(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    print(f"{path}: {_describe_set(content)}")


def prompts_load(args: Namespace, settings: Settings) -> None:
    """Look for the prompts of a set."""
    content = _read_set(_path_of(args))
    with connect(args, settings) as client:
        client.set_prompts(**content)
    print(_describe_set(content))


def prompts_list(args: Namespace, settings: Settings) -> None:
    """List the sets."""
    for path in _list_sets(_folder(args)):
        try:
            text = _describe_set(_read_set(path))
        except SettingsError as error:
            text = f"cannot be used: {printable(str(error))}"
        print(f"{printable(path.stem):<24} {text}")


def _folder(args: Namespace) -> Path:
    beside = args.profile.parent if args.profile else Path()
    folder: Path = args.folder or beside / SETS_FOLDER
    return folder


def _path_of(args: Namespace) -> Path:
    if safe_file_name(args.name) != args.name:
        raise SettingsError(f"name: expected letters, digits, _ . and -, found {args.name!r:.80}")
    return _folder(args) / f"{args.name}{SUFFIX}"


def _list_sets(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _read_set(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SET_BYTES + 1)
    except FileNotFoundError:
        names = [other.stem for other in _list_sets(path.parent)]
        raise SettingsError(
            f"{path}: expected a set of prompts ({', '.join(names) or 'there are none'}), found none"
            f"{did_you_mean(path.stem, names)}; keep one with sam3-node prompts save"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the set of prompts: {error.strerror}") from error
    try:
        if len(data) > MAX_SET_BYTES:
            raise ValueError(f"more than {MAX_SET_BYTES} bytes")
        content = dict(json.loads(data))
        OPERATIONS["set_prompts"].read("set_prompts", content)
    except (ValueError, TypeError, RecursionError, RequestError, WireError) as error:
        raise SettingsError(
            f'{path}: expected JSON such as {{"prompts": ["red mug"], "scores": {{"red mug": 0.3}}, "most": {{}}}}, '
            f"found {error}"
        ) from error
    return content


def _describe_set(content: dict[str, Any]) -> str:
    return ", ".join(map(printable, content["prompts"])) or "no prompts"


def _add_prompt_options(parser: CommandParser, default_frame: str) -> None:
    """Add the options that mark an object on a frame, in pixels."""
    parser.add_repeated("--point X,Y", "point inside the object", parse_point)
    parser.add_repeated("--exclude X,Y", "point outside the object", parse_point)
    parser.add("--box X0,Y0,X1,Y1", "box around the object", parse_box)
    parser.add("--seq N", f"number of a recent frame; default: {default_frame}", int)


def _make_prompt(args: Namespace) -> dict[str, Any]:
    points, labels = [*args.point, *args.exclude], [1] * len(args.point) + [0] * len(args.exclude)
    marked = [*(value for point in points for value in point), *(args.box or ())]
    if marked and all(0 <= value <= 1 for value in marked):
        print_notice(
            "sam3-node: warning: the prompt marks only the first pixel; expected pixels of the camera's frame, not "
            "fractions of its size"
        )
    return {
        "points": points or None,
        "labels": labels or None,
        "box": args.box,
        "seq": args.seq,
        "camera": args.camera,
    }


def _describe(segmentation: Segmentation) -> str:
    mask = segmentation.mask
    box = ",".join(map(str, mask.box))
    return f"seq {segmentation.seq}  score {segmentation.score:.3f}  area {mask.area}  box {box}"


def _read_mask(path: Path | None) -> Mask | None:
    """Read a mask from an image file. Pixels other than 0 are inside."""
    if path is None:
        return None
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise RequestError(f"mask {path}: expected a readable image file")
    return Mask.from_full(image > 0)


def _label_image(masks: Sequence[Mask]) -> Any:
    """Return uint16 [h, w] with the number of the smallest mask around each pixel, counted from 1; 0 outside."""
    import numpy as np

    labels = np.zeros(masks[0].size, np.uint16)
    for number in sorted(range(len(masks)), key=lambda number: -masks[number].area):
        labels[masks[number].full()] = number + 1
    return labels


def _write_image(path: Path, image: Any) -> None:
    """Write an image as PNG. Raises OutputError."""
    import cv2

    with explain_os_error(OutputError, f"cannot write {path}"):
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())

"""Commands that send requests to a running node: objects, prompts, snapshots and status; sets of prompts in files."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import (
    NoCameraError,
    RequestError,
    SettingsError,
    WireError,
    did_you_mean,
    request_id,
)
from ..files import (
    explain_os_error,
    make_folder,
    parse_json,
    prepare_output,
    read_regular,
    safe_file_name,
    write_output,
)
from ..processes.signals import WaitingNotice, print_notice
from ..schema import operations as ops
from ..schema.describing import read_meanings
from ..settings import Settings
from ..types import NANOSECONDS, Mask, Priority
from ..wire.images import MAX_PHOTO_FILE, check_photo, find_compression
from ..wire.requests import read_operation
from .parser import ANSWER_TIMEOUT_S, CommandParser, Commands, parse_box, parse_named, parse_point
from .progress import list_more, printable

if TYPE_CHECKING:
    from ..client import ObjectPlace, PerceptionClient, Segmentation

Ask = Callable[["PerceptionClient", Namespace], Any]
"""Sends the request of a command. Yields the lines to print, if there are any."""
SETS_FOLDER = Path("prompts")
"""Folder of prompt sets, beside the profile or in the working directory."""
SUFFIX = ".json"
MAX_SET_BYTES = 1 << 20
"""Size of the largest file with a set of prompts."""
MAX_MASK_FILE = 64 << 20
"""Bytes of the image file of `--mask`. A larger one is refused."""
EVERYTHING = ("--grid N", "--min-iou P", "--min-stability P", "--max-overlap P", "--most N", "--seq N")
"""Options of the search for everything."""
OBJECT_SHOWN = frozenset(
    [
        "camera",
        "id",
        "label",
        "state",
        "score",
        "age",
        "frames_since_seen",
        "epoch",
        "silent_s",
        "confidence",
        "name_confidence",
    ]
)
"""Fields of an object that have a place in its line, or none. Others follow by their names."""
PLACE_SHOWN = frozenset(
    [
        "camera",
        "id",
        "label",
        "state",
        "in_view",
        "age_s",
        "seq",
        "capture_ns",
        "box",
        "confidence",
        "frame",
        "position_m",
        "camera_position_m",
        "covariance_m2",
        "size_m",
        "camera_pose",
        "held",
        "hidden_by",
        "has_picture",
        "silent_s",
        "epoch",
    ]
)
"""The same of a place"""
FRAME_SIZE_MS = 500
"""Longest time to wait for masks before a box is sent."""
FIRST_FRAME_MS = 10_000
"""Longest time to wait for the first frame of a camera before an object is added."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_objects(commands)
    _add_where(commands)
    _add_segment(commands)
    _add_segment_everything(commands)
    _add_prompt(commands)
    _add_exemplar(commands)
    _add_snapshots(commands)
    _add(commands, "status", status)
    _add(commands, "pause", pause)
    _add(commands, "resume", resume)
    _add_episodes(commands)
    _add(commands, "reset", reset).add_field("--camera NAME", ops.Reset)
    _add_request(commands)


def _add(
    commands: Commands,
    name: str,
    ask: Ask,
    has_camera: bool = False,
    waits: Callable[[Namespace], bool] = lambda _: False,
    takes_long: bool = False,
) -> CommandParser:
    """Add a command that sends a request and prints the lines that `ask` yields, with the options of such commands.

    If the request `waits` for a frame, it says on stderr why the node does not act on it yet.
    """

    parser = commands.add(name, update_wrapper(partial(_send, ask, waits), ask))
    if has_camera:
        parser.add_field("--camera NAME", ops.AddObject)
    parser.add_timeout(takes_long)
    parser.add("--request-id ID", "its id in logs, events and errors")
    return parser


def _send(ask: Ask, waits: Callable[[Namespace], bool], args: Namespace, settings: Settings) -> None:
    """Connect to the node, and send a request. While it waits for its answer, a thread says on stderr why."""
    from ..client import PerceptionClient
    from ..transport import Security
    from .watch import NodeProbe

    # two connections: the probe asks why the node does not answer, while the request waits for its answer
    transport = settings.transport
    with NodeProbe(settings) as probe:
        with (
            request_id(args.request_id),
            PerceptionClient(
                transport.masks,
                transport.control,
                timeout_ms=round((args.timeout or ANSWER_TIMEOUT_S) * 1000),
                security=Security.from_settings(transport),
            ) as client,
            WaitingNotice(probe.explain_answer),
        ):
            for line in ask(client, args) or ():
                print(line)
        # the request is done, but its effect needs a frame: say why none is processed
        if waits(args) and (reason := probe.explain_frames()):
            print_notice(f"nothing happens yet: {reason}")


def status(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Print the status of a running node as JSON."""
    yield json.dumps(client.status(), indent=2)


def pause(client: PerceptionClient, args: Namespace) -> None:
    """Make a running node skip frames until resume."""
    client.pause()


def resume(client: PerceptionClient, args: Namespace) -> None:
    """Make a paused node process frames again."""
    client.resume()


def _add_episodes(commands: Commands) -> None:
    group = commands.add_group("episode", "mark the episodes of a dataset in a running recording")
    begin = _add(group, "begin", episode_begin, takes_long=True)
    begin.add_field("task TASK", ops.BeginEpisode, nargs="?")
    _add(group, "end", episode_end)
    _add(group, "discard", episode_discard)


def episode_begin(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Begin an episode, for `record --lerobot` and `convert`."""
    options = {} if args.timeout is None else {"timeout_ms": round(1000 * args.timeout)}
    begun = client.begin_episode(args.task, **options)
    yield f"episode {begun['episode']} has begun: {printable(begun['task']) or 'named by what is looked for'}"


def episode_end(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """End the episode, and keep it."""
    yield _describe_end(client.end_episode())


def episode_discard(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """End the episode, and discard it: recorders leave it out."""
    yield _describe_end(client.end_episode(keep=False))


def _describe_end(ended: Mapping[str, Any]) -> str:
    seconds = (ended["ended_ns"] - ended["begun_ns"]) / NANOSECONDS
    outcome = "kept" if ended["keep"] else "discarded"
    return f"episode {ended['episode']} is {outcome}: {seconds:.1f} s"


def reset(client: PerceptionClient, args: Namespace) -> None:
    """Remove all objects, of one camera or of all."""
    client.reset(camera=args.camera)


def _add_request(commands: Commands) -> None:
    parser = _add(commands, "request", request)
    parser.add("op OP", "operation of the control socket", choices=tuple(ops.OPERATIONS))
    parser.add("arguments NAME=VALUE", "argument of it; a value is JSON, or a text as it is", nargs="*")


def request(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Send any request, and print its reply as JSON.

    Binary data, such as masks, is in base64.
    """
    given = dict(_read_argument(text) for text in args.arguments)
    operation: ops.Operation[Any] = read_operation(args.op, given)
    reply = client.ask(operation)
    yield msgspec.json.format(msgspec.json.encode(reply), indent=2).decode()


def _read_argument(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator:
        raise RequestError(f"expected NAME=VALUE, found {text!r:.80}")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def _add_objects(commands: Commands) -> None:
    objects = commands.add_group(
        "object",
        "add, correct, rename, remove and list the tracked objects of a running node, and print their points",
    )
    added = _add(objects, "add", object_add, True, lambda args: args.seq is None and args.like is None)
    added.add_field("--label LABEL", ops.AddObject)
    added.add_field("--priority", ops.AddObject)
    added.add_field("--choice N", ops.AddObject)
    added.add_field("--like ID", ops.AddLike)
    added.add_field("--like-camera NAME", ops.AddLike)
    refine = _add(objects, "refine", object_refine, has_camera=True)
    remove = _add(objects, "remove", object_remove, has_camera=True)
    rename = _add(objects, "rename", object_rename, has_camera=True)
    points = _add(objects, "points", object_points, has_camera=True)
    points.add_field("--count N", ops.ReadPoints, default=1000)
    for parser in (refine, remove, rename, points):
        parser.add_field("id ID", ops.RemoveObject)
    rename.add_field("label LABEL", ops.RenameObject)
    _add_prompt_options(added, ops.AddObject)
    _add_prompt_options(refine, ops.RefineObject)
    for parser in (added, refine):
        text = "image of the size of the frame; pixels other than 0 are inside the object"
        parser.add_path("--mask FILE.png", text)
    _add(objects, "list", object_list, has_camera=True)


def object_add(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Track a new object and print its id.

    The id stands alone on its line, so that scripts can read it.
    """
    prompt = {**_make_prompt(args), "mask": _read_mask(args.mask), "choice": args.choice}
    if args.box and args.seq is None:
        client.latest(FRAME_SIZE_MS)  # masks tell the size of the frame, and so whether it holds the box
    looks = {"like": args.like, "like_camera": args.like_camera}
    add = partial(client.add_object, **prompt, **looks, label=args.label, priority=args.priority)
    try:
        added = add()
    except NoCameraError:
        # a script starts camera, node and objects at once, and the client has waited for its own time alone
        client.wait_for_camera(FIRST_FRAME_MS)
        added = add()
    yield str(added.id)


def object_refine(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Correct the mask of an object."""
    yield _describe(client.refine_object(args.id, **_make_prompt(args), mask=_read_mask(args.mask)))


def object_remove(client: PerceptionClient, args: Namespace) -> None:
    """Stop tracking an object."""
    client.remove_object(args.id, camera=args.camera)


def object_rename(client: PerceptionClient, args: Namespace) -> None:
    """Change the label of an object."""
    client.rename_object(args.id, args.label, camera=args.camera)


def object_list(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """List the tracked objects."""
    for tracked in client.list_objects(camera=args.camera):
        unseen = ""
        if tracked.frames_since_seen:
            unseen = f"  unseen for {tracked.frames_since_seen}"
        line = (
            f"{printable(tracked.camera):<12} {tracked.id:>4}  {printable(tracked.label):<24} {tracked.state:<10} "
            f"score {tracked.score:.2f}  age {tracked.age}{unseen}"
        )
        yield "  ".join([line, *list_more(tracked, OBJECT_SHOWN)])


def object_points(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Print the points of an object's visible surface."""
    surface = client.points(args.id, count=args.count, camera=args.camera)
    yield f"# frame {printable(surface.frame)}, seq {surface.seq}: x y z in metres"
    yield from (" ".join(f"{value:.4f}" for value in point) for point in surface.points_m.tolist())


def _add_where(commands: Commands) -> None:
    parser = _add(commands, "where", where, has_camera=True)
    text = "name of objects, or the id of one; without it, all that the node knows, also lost ones"
    parser.add("target NAME|ID", text, nargs="?")
    parser.add_flag("--json", "print all that is known of them, as JSON")
    parser.add_path("--picture FILE.jpg", "write the last picture of the first object of the list")


def where(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Say where objects are, or where they were seen last.

    Print a line about each: those in view first, then those that were seen last. "unknown" if there is none.
    """
    if args.picture is not None:
        prepare_output(args.picture)
    target = args.target
    if target is not None and target.isdecimal():
        target = int(target)
    places = client.where(target, camera=args.camera)
    if args.json:
        yield json.dumps([asdict(place) for place in places], indent=2, ensure_ascii=False)
    else:
        yield from map(_describe_place, places)
        if not places:
            yield "unknown"
    if args.picture is not None:
        if not places:
            raise RequestError("--picture: expected an object that the node knows, found none")
        first = places[0]
        picture = client.picture(first.id, camera=first.camera, epoch=first.epoch)
        write_output(args.picture, picture.jpeg)


def _describe_place(place: ObjectPlace) -> str:
    """Return one line: camera, id, label, state, when it was seen, where, and what may have moved or covered it."""
    seen = "not seen yet"
    if place.in_view:
        seen = "in view"
    elif place.age_s is not None:
        seen = f"seen {place.age_s:.1f} s ago"
    parts = [f"{seen:<18}"]
    if place.position_m is not None:
        position = " ".join(f"{length:.3f}" for length in place.position_m)
        parts.append(f"at {position} m in {printable(place.frame or '?')}")
    elif place.box is not None:
        parts.append(f"box {','.join(map(str, place.box))}")
    if place.held:
        parts.append("held")
    if place.hidden_by is not None:
        parts.append(f"hidden by {printable(place.hidden_by)}")
    line = f"{printable(place.camera):<12} {place.id:>4}  {printable(place.label):<24} {place.state:<10} "
    return (line + "  ".join([*parts, *list_more(place, PLACE_SHOWN)])).rstrip()


def _add_segment(commands: Commands) -> None:
    parser = _add(commands, "segment", segment, has_camera=True)
    _add_prompt_options(parser, ops.SegmentFrame)
    parser.add_path("--out MASK.png", "image file for the mask, with 255 inside")
    parser.add_field("--multimask", ops.SegmentFrame)


def segment(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Segment a recent frame once, without tracking.

    Print a line about the mask, and write the mask if --out is given.
    """
    # an output that cannot be written is refused before the node works for it
    if args.out is not None:
        prepare_output(args.out)
    segmentation = client.segment(**_make_prompt(args), multimask=args.multimask)
    yield _describe(segmentation)
    for number, candidate in enumerate(segmentation.candidates):
        yield f"{number:>3}  {_describe(candidate)}"
    if args.out is not None:
        _write_image(args.out, segmentation.mask.full().astype("uint8") * 255)


def _add_segment_everything(commands: Commands) -> None:
    parser = _add(commands, "segment-everything", segment_everything, has_camera=True, takes_long=True)
    for spec in EVERYTHING:
        parser.add_field(spec, ops.SegmentEverything)
    parser.add_path(
        "--out LABELS.png",
        "16-bit image: each pixel has the number of the smallest mask around it, 0 outside all of them",
    )


def segment_everything(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Segment everything on a recent frame once, without prompts and tracking.

    Print a line about each mask, and write the masks if --out is given.
    """
    if args.out is not None:
        prepare_output(args.out)
    options = {name: getattr(args, name) for name in ops.SegmentEverything.__struct_fields__}
    # without --timeout, the client waits as long as such a search may take
    if args.timeout is not None:
        options["timeout_ms"] = round(1000 * args.timeout)
    everything = client.segment_everything(**options)
    for number, segmentation in enumerate(everything, start=1):
        yield f"{number:>3}  {_describe(segmentation)}"
    if not everything:
        yield everything.note or "nothing is sure enough; a larger --grid may find smaller things"
    elif args.out is not None:
        _write_image(args.out, _label_image([segmentation.mask for segmentation in everything]))


def _add_prompt(commands: Commands) -> None:
    parser = _add(commands, "prompt", set_prompts, waits=lambda _: True)
    parser.add("names NAME", 'name such as "red mug"; without names the search stops', nargs="*")
    meanings = read_meanings(ops.SetPrompts)
    parser.add_repeated("--score NAME=SCORE", meanings["scores"], parse_named(float))
    parser.add_repeated("--most NAME=COUNT", meanings["most"], parse_named(int))
    text = "low priority: under load, track objects of this name on every second frame"
    parser.add_repeated("--low NAME", text)


def set_prompts(client: PerceptionClient, args: Namespace) -> None:
    """Set the names of objects to look for."""
    low: dict[str, Priority] = dict.fromkeys(args.low, "low")
    client.set_prompts(args.names, scores=dict(args.score), most=dict(args.most), priorities=low)


def _add_exemplar(commands: Commands) -> None:
    parser = _add(commands, "exemplar", add_exemplar, True, lambda _: True)
    parser.add_field("name NAME", ops.AddExemplar)
    parser.add_repeated("--box X0,Y0,X1,Y1", "box around a thing that is meant", parse_box)
    parser.add_repeated("--exclude X0,Y0,X1,Y1", "box around a thing that is not", parse_box)
    parser.add_field("--text WORDS", ops.AddExemplar)
    parser.add_path("--photo FILE", read_meanings(ops.AddExemplar)["photo"])
    parser.add_field("--seq N", ops.AddExemplar)


def add_exemplar(client: PerceptionClient, args: Namespace) -> None:
    """Look for all that is like boxes on a frame or a photo."""
    with explain_os_error(SettingsError, f"cannot read {args.photo}"):
        photo = args.photo and read_regular(args.photo, MAX_PHOTO_FILE)
    boxes = [*args.box, *args.exclude]
    labels = [1] * len(args.box) + [0] * len(args.exclude)  # 1: what is meant, 0: what is not
    client.add_exemplar(
        args.name, boxes, labels, text=args.text, photo=photo, seq=args.seq, camera=args.camera
    )


def _add_snapshots(commands: Commands) -> None:
    snapshots = commands.add_group("snapshot", "keep and restore what a running node tracks")
    save = _add(snapshots, "save", snapshot_save)
    restore = _add(snapshots, "restore", snapshot_restore)
    for parser in (save, restore):
        parser.add_field("name NAME", ops.RestoreSnapshot)
    _add(snapshots, "fetch", snapshot_fetch).add_path("out FILE", "file to write")
    sets = commands.add_group("prompts", "keep and use sets of prompts by name")
    keep = _add(sets, "save", prompts_save)
    load = _add(sets, "load", prompts_load)
    for parser in (keep, load):
        parser.add("name NAME", "name of the set")
    text = f"folder of the sets; default: {SETS_FOLDER}/ beside --profile, or in the working directory"
    for parser in (keep, load, sets.add("list", prompts_list)):
        parser.add_path("--folder FOLDER", text)


def snapshot_save(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Write a snapshot in the node's folder of snapshot.path."""
    saved = client.snapshot(args.name)
    yield f"{args.name}: {saved.size} bytes, sha256 {saved.sha256}"


def snapshot_restore(client: PerceptionClient, args: Namespace) -> None:
    """Track again what was saved; object ids begin again."""
    client.restore(args.name)


def snapshot_fetch(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Copy a snapshot to a file, for sam3-node run --restore-from."""
    prepare_output(args.out)
    data = client.fetch_snapshot()
    write_output(args.out, data)
    yield f"{args.out}: {len(data)} bytes"


def prompts_save(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Keep the prompts of the running node, with their limits."""
    status = client.status()
    # a set is text, and boxes on a frame are not: a snapshot has both
    if shown := status.get("exemplars"):
        raise SettingsError(
            f"expected names alone, found exemplars of {', '.join(map(printable, shown))}; use snapshot save"
        )
    content = {"prompts": status["prompts"], **status["prompt_limits"]}
    path = _path_of(args)
    make_folder(path.parent)
    write_output(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    yield f"{path}: {_describe_set(content)}"


def prompts_load(client: PerceptionClient, args: Namespace) -> Iterator[str]:
    """Look for the prompts of a set."""
    content = _read_set(_path_of(args))
    client.set_prompts(**content)
    yield _describe_set(content)


def prompts_list(args: Namespace, settings: Settings) -> None:
    """List the sets."""
    for path in _list_sets(_folder(args)):
        try:
            text = _describe_set(_read_set(path))
        except SettingsError as error:
            text = f"cannot be used: {printable(str(error))}"
        print(f"{printable(path.stem):<24} {text}")


def _folder(args: Namespace) -> Path:
    folder: Path | None = args.folder
    if folder is None and args.profile:
        folder = args.profile.parent / SETS_FOLDER
    return folder or SETS_FOLDER


def _path_of(args: Namespace) -> Path:
    if safe_file_name(args.name) != args.name:
        raise SettingsError(f"name: expected letters, digits, _ . and -, found {args.name!r:.80}")
    return _folder(args) / f"{args.name}{SUFFIX}"


def _list_sets(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _read_set(path: Path) -> Mapping[str, Any]:
    try:
        data = read_regular(path, MAX_SET_BYTES)
    except FileNotFoundError:
        names = [other.stem for other in _list_sets(path.parent)]
        raise SettingsError(
            f"{path}: expected a set of prompts ({', '.join(names) or 'there are none'}), found none"
            f"{did_you_mean(path.stem, names)}; keep one with sam3-node prompts save"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the set of prompts: {error.strerror}") from error
    # checked as the node would check it: an error names this file, and nothing was changed yet
    try:
        content = dict(parse_json(data))
        read_operation(ops.SetPrompts.op, content)
    except (ValueError, TypeError, RequestError, WireError) as error:
        raise SettingsError(
            f'{path}: expected JSON such as {{"prompts": ["red mug"], "scores": {{"red mug": 0.3}}, "most": {{}}}}, '
            f"found {error}"
        ) from error
    return content


def _describe_set(content: Mapping[str, Any]) -> str:
    return ", ".join(map(printable, content["prompts"])) or "no prompts"


def _add_prompt_options(parser: CommandParser, kind: type[ops.PromptOperation[Any]]) -> None:
    """Add the options that mark an object on a frame, in pixels."""
    parser.add_repeated("--point X,Y", "point inside the object", parse_point)
    parser.add_repeated("--exclude X,Y", "point outside the object", parse_point)
    parser.add("--box X0,Y0,X1,Y1", "box around the object", parse_box)
    parser.add_field("--seq N", kind)


def _make_prompt(args: Namespace) -> Mapping[str, Any]:
    points = [*args.point, *args.exclude]
    labels = [1] * len(args.point) + [0] * len(args.exclude)  # 1 inside, 0 outside
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
    """Read a mask from an image file. The opaque part is inside; without a transparent part, pixels other than 0."""
    if path is None:
        return None
    import cv2
    import numpy as np

    from ..replay.davis_png import find_opaque

    try:
        data = read_regular(path, MAX_MASK_FILE)
        # OpenCV reads more kinds of files, but these two may be small and have many pixels
        if find_compression(data) is not None:
            check_photo(data)
    except OSError as error:
        raise RequestError(f"mask {path}: cannot be read: {error.strerror}") from error
    except WireError as error:
        raise RequestError(f"mask {path}: {error}") from error
    image = None
    # an empty file is an error of OpenCV's own
    if data:
        encoded = np.frombuffer(data, np.uint8)
        # 16-bit values as they are: in 8 bits, the labels of segment-everything would be 0
        image = cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_ANYDEPTH)
    if image is None:
        raise RequestError(f"mask {path}: expected a readable image file")
    # a cut-out of an editor: what its transparent part hides may have any colour
    unchanged: Any = cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED)
    opaque = find_opaque(unchanged)
    inside = image > 0
    if opaque is not None:
        inside = opaque
    return Mask.from_full(inside)


def _label_image(masks: Sequence[Mask]) -> Any:
    """Return uint16 [h, w] with the number of the smallest mask around each pixel, counted from 1; 0 outside."""
    import numpy as np

    labels = np.zeros(masks[0].size, np.uint16)
    # large masks first, so that smaller ones within them are drawn over
    for number in sorted(range(len(masks)), key=lambda number: -masks[number].area):
        labels[masks[number].full()] = number + 1
    return labels


def _write_image(path: Path, image: Any) -> None:
    """Write an image as PNG. Raises OutputError."""
    import cv2

    write_output(path, cv2.imencode(".png", image)[1].tobytes())

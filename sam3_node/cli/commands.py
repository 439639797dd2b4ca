"""The commands of `sam3-node`. Each imports its heavy dependencies when it runs.

Mask images that the commands read and write.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CameraError, OutputError, RequestError, VocabularyError, require
from ..files import prepare_output
from ..processes.logs import announce, log_subject, raise_descriptor_limit
from ..processes.notify import Watchdog
from ..processes.signals import stop_on_signals
from ..settings import Settings
from ..types import Mask
from .progress import printable

if TYPE_CHECKING:
    from ..client import PerceptionClient, Segmentation
    from ..detection.phrases import PhraseEncoder
    from ..detection.vocabulary import Vocabulary
    from ..types import Priority

ANSWER_TIMEOUT_S = 3.0
LIST_SOURCES = "list"
"""Source of the camera command that lists the sources."""
PUBLIC_TEXT_ENCODER = "openai/clip-vit-base-patch32"
"""Model that made the text vectors in public checkpoints of YOLO-World."""

Command = Callable[[Namespace, Settings], int | None]
"""A command. It returns its exit code; None means 0."""


class AddCommand(Protocol):
    """A function that adds a command to subparsers, with its name, its function and its help text."""

    def __call__(self, parsers: Any, name: str, run: Command, text: str) -> ArgumentParser: ...


def run(args: Namespace, settings: Settings) -> None:
    """Run the node until a signal."""
    # set this before torch is imported. Threads that spin too long at barriers take CPU time from cameras; threads that
    # sleep at once (OMP_WAIT_POLICY=PASSIVE) make two threads no faster than one
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with watch_process(settings) as watchdog:
        require("torch", "node")
        require("transformers", "node")
        from ..node.node import Node

        raise_descriptor_limit()
        with Node(settings, args.restore_from, watchdog) as node, notify_about_frames("run", settings):
            # catch signals only when the node is ready: before, there is no frame to finish, and a signal ends the
            # process
            node.main_loop(stop_on_signals())


def camera(args: Namespace, settings: Settings) -> None:
    """Publish frames until a signal or the end of the source, or list the sources."""
    if settings.camera.source == LIST_SOURCES:
        from ..cameras.sources import list_cameras

        for line in list_cameras(args.folder or Path()):
            print(printable(line))
        return
    if args.folder is not None:
        raise CameraError(f"expected one source, found {settings.camera.source!r} and {str(args.folder)!r}")
    from ..cameras.publish import run_camera

    raise_descriptor_limit()
    with watch_process(settings) as watchdog, log_subject(settings.camera.name):
        run_camera(settings, stop_on_signals(), watchdog)


def watch(args: Namespace, settings: Settings) -> None:
    """Show masks until a signal."""
    from .watch import run_watch

    run_watch(settings, args.overlay, args.frames, stop_on_signals())


def record(args: Namespace, settings: Settings) -> None:
    """Record the messages of cameras and node until a signal."""
    from ..recording.recorder import Trigger, run_record

    raise_descriptor_limit()
    stop, trigger = stop_on_signals(), Trigger()
    if settings.record.ring_s:
        trigger.listen(sys.stdin)
    with watch_process(settings) as watchdog, notify_about_frames("record", settings):
        run_record(settings, stop, trigger=trigger, watchdog=watchdog)


def console(args: Namespace, settings: Settings) -> None:
    """Serve the console's page until a signal."""
    for module in ("starlette", "uvicorn", "websockets"):
        require(module, "console")
    from ..console.serve import run_console

    raise_descriptor_limit()
    with watch_process(settings) as watchdog:
        run_console(
            settings,
            stop_on_signals(),
            args.recording,
            args.against,
            announce=lambda url: announce(f"console at {url}"),
            watchdog=watchdog,
        )


def demo(args: Namespace, settings: Settings) -> None:
    """Run the demonstration."""
    from .demo import run_demo

    run_demo(args.out, args.seconds, settings)


def doctor(args: Namespace, settings: Settings) -> int:
    """Check the installation. Return 0 if the core works."""
    from .doctor import run_doctor

    return run_doctor(settings)


def watch_process(settings: Settings) -> Watchdog:
    """Report to the supervisor of this process, if it has one, that it is alive."""
    return Watchdog(settings.group.hang_s, os.environ)


@contextmanager
def connect(args: Namespace, settings: Settings) -> Iterator[PerceptionClient]:
    """Connect to the node. While a request waits for its answer, a thread says on stderr why."""
    from ..client import PerceptionClient
    from ..processes.signals import WaitingNotice
    from ..transport import Security
    from .watch import NodeProbe

    transport = settings.transport
    with (
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


@contextmanager
def notify_about_frames(command: str, settings: Settings) -> Iterator[None]:
    """Say on stderr why the node gets no frames, until it processes some."""
    from ..processes.signals import WaitingNotice, print_notice
    from .watch import NodeProbe

    if settings.transport.control.endswith("*"):  # the port is known to the node only
        yield
        return
    with (
        NodeProbe(settings) as probe,
        WaitingNotice(probe.explain_frames, lambda line: print_notice(f"{command}: {line}")),
    ):
        yield


def _report_idle(settings: Settings) -> None:
    """Say on stderr why the node does not act on what it was given, such as that it is paused."""
    from ..processes.signals import print_notice
    from .watch import NodeProbe

    with NodeProbe(settings) as probe:
        if reason := probe.explain_frames():
            print_notice(f"nothing happens yet: {reason}")


def object_add(args: Namespace, settings: Settings) -> None:
    """Track an object and print its id alone on a line, so that scripts can read it."""
    with connect(args, settings) as client:
        given = {"mask": read_mask(args.mask), "label": args.label, "priority": args.priority}
        print(client.add_object(**_make_prompt(args), **given).id)
    if args.seq is None:
        _report_idle(settings)


def object_refine(args: Namespace, settings: Settings) -> None:
    """Correct an object and print a line about its mask."""
    with connect(args, settings) as client:
        print(_describe(client.refine_object(args.id, **_make_prompt(args), mask=read_mask(args.mask))))


def object_remove(args: Namespace, settings: Settings) -> None:
    """Stop tracking an object."""
    with connect(args, settings) as client:
        client.remove_object(args.id, camera=args.camera)


def object_rename(args: Namespace, settings: Settings) -> None:
    """Change the label of an object."""
    with connect(args, settings) as client:
        client.rename_object(args.id, args.label, camera=args.camera)


def object_list(args: Namespace, settings: Settings) -> None:
    """Print one line for each object."""
    with connect(args, settings) as client:
        objects = client.list_objects(camera=args.camera)
    for tracked in objects:
        unseen = f"  unseen for {tracked.frames_since_seen}" if tracked.frames_since_seen else ""
        print(
            f"{printable(tracked.camera):<12} {tracked.id:>4}  {printable(tracked.label):<24} {tracked.state:<10} "
            f"score {tracked.score:.2f}  age {tracked.age}{unseen}"
        )


def object_points(args: Namespace, settings: Settings) -> None:
    """Print the points of an object's surface, one line of x, y and z in metres for each."""
    with connect(args, settings) as client:
        found = client.points(args.id, count=args.count, camera=args.camera)
    print(f"# frame {printable(found.frame)}, seq {found.seq}: x y z in metres")
    for point in found.points_m.tolist():
        print(*(f"{value:.4f}" for value in point))


def segment(args: Namespace, settings: Settings) -> None:
    """Segment a recent frame once, print a line about the mask, and write it if --out is given."""
    if args.out is not None:
        prepare_output(args.out)
    with connect(args, settings) as client:
        segmentation = client.segment(**_make_prompt(args))
    print(_describe(segmentation))
    if args.out is not None:
        write_image(args.out, segmentation.mask.full().astype("uint8") * 255)


def segment_everything(args: Namespace, settings: Settings) -> None:
    """Segment everything on a recent frame once, print a line about each mask, and write them if --out is given."""
    if args.out is not None:
        prepare_output(args.out)
    with connect(args, settings) as client:
        found = client.segment_everything(
            grid=args.grid,
            min_iou=args.min_iou,
            min_stability=args.min_stability,
            most=args.most,
            seq=args.seq,
            camera=args.camera,
        )
    for number, segmentation in enumerate(found, start=1):
        print(f"{number:>3}  {_describe(segmentation)}")
    if not found:
        print(found.note or "nothing is sure enough; a larger --grid may find smaller things")
    elif args.out is not None:
        write_image(args.out, label_image([segmentation.mask for segmentation in found]))


def set_prompts(args: Namespace, settings: Settings) -> None:
    """Set the names of the objects to look for."""
    with connect(args, settings) as client:
        low: dict[str, Priority] = dict.fromkeys(args.low, "low")
        client.set_prompts(args.names, scores=dict(args.score), most=dict(args.most), priorities=low)
    _report_idle(settings)


def vocabulary_build(args: Namespace, settings: Settings) -> None:
    """Write a vocabulary file and print a line about it."""
    require("safetensors", "node")
    from ..detection.vocabulary import build_vocabulary, read_phrases, read_source

    prepare_output(args.out)
    phrases = [*args.phrases, *(read_phrases(args.phrase_file) if args.phrase_file else [])]
    sources = [read_source(path, args.model) for path in args.sources]
    vocabulary = build_vocabulary(phrases, sources, _load_encoder(args.encoder, args.model))
    vocabulary.save(args.out)
    print(_describe_vocabulary(args.out, vocabulary))


def vocabulary_list(args: Namespace, settings: Settings) -> None:
    """Print a line about a vocabulary, then one line for each phrase."""
    require("safetensors", "node")
    from ..detection.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(args.file)
    print(_describe_vocabulary(args.file, vocabulary))
    print(*vocabulary.phrases, sep="\n")


def weights_convert(args: Namespace, settings: Settings) -> None:
    """Convert a checkpoint with the vocabulary that is in it, and print a line about each."""
    for module in ("torch", "transformers", "safetensors"):
        require(module, "node")
    from ..detection.detectors import VOCABULARY
    from ..models.yolo.convert import convert_checkpoint

    model = convert_checkpoint(args.file, args.out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{args.out}: YOLO-World, {millions:.1f} M parameters, phrase vectors of {model.config.text_channels}"
    )
    vocabulary = _read_vocabulary(args.file)
    if vocabulary is not None:
        vocabulary.save(args.out / VOCABULARY)
        print(_describe_vocabulary(args.out / VOCABULARY, vocabulary))


def status(args: Namespace, settings: Settings) -> None:
    """Print the status of the node as JSON."""
    with connect(args, settings) as client:
        print(json.dumps(client.status(), indent=2))


def pause(args: Namespace, settings: Settings) -> None:
    """Make the node skip frames until `resume`."""
    with connect(args, settings) as client:
        client.pause()


def resume(args: Namespace, settings: Settings) -> None:
    """Make the node process frames again."""
    with connect(args, settings) as client:
        client.resume()


def reset(args: Namespace, settings: Settings) -> None:
    """Remove all objects, of one camera or of all."""
    with connect(args, settings) as client:
        client.reset(camera=args.camera)


def _load_encoder(folder: Path | None, model: str | None) -> PhraseEncoder | None:
    """Load the text encoder of a folder. Return None without a folder."""
    if folder is None:
        return None
    require("torch", "node")
    require("transformers", "node")
    from ..detection.clip_text import ClipText

    return ClipText(folder, model=model)


def _read_vocabulary(checkpoint: Path) -> Vocabulary | None:
    """Return the classes in a YOLO-World checkpoint as a vocabulary. Warn and return None if it has none."""
    from ..detection.vocabulary import Vocabulary
    from ..models.yolo.convert import read_phrase_vectors

    found = read_phrase_vectors(checkpoint)
    try:
        if found is None:
            raise VocabularyError("it has no text vectors with names")
        return Vocabulary(found[0], found[1].numpy(), PUBLIC_TEXT_ENCODER)
    except VocabularyError as error:
        print(
            f"sam3-node: warning: {checkpoint}: no vocabulary was written: {error}; build one with "
            "sam3-node vocabulary build, or set detector.text_encoder",
            file=sys.stderr,
        )
        return None


def _describe_vocabulary(path: Path, vocabulary: Vocabulary) -> str:
    return f"{path}: {len(vocabulary)} phrases, model {vocabulary.model}, dimension {vocabulary.dimension}"


def _describe(segmentation: Segmentation) -> str:
    mask = segmentation.mask
    box = ",".join(map(str, mask.box))
    return f"seq {segmentation.seq}  score {segmentation.score:.3f}  area {mask.area}  box {box}"


def _make_prompt(args: Namespace) -> dict[str, Any]:
    points, labels = [*args.point, *args.exclude], [1] * len(args.point) + [0] * len(args.exclude)
    marked = [*(value for point in points for value in point), *(args.box or ())]
    if marked and all(0 <= value <= 1 for value in marked):
        print(
            "sam3-node: warning: the prompt marks only the first pixel; expected pixels of the camera's frame, not "
            "fractions of its size",
            file=sys.stderr,
        )
    return {
        "points": points or None,
        "labels": labels or None,
        "box": args.box,
        "seq": args.seq,
        "camera": args.camera,
    }


def read_mask(path: Path | None) -> Mask | None:
    """Read a mask from an image file. Pixels other than 0 are inside."""
    if path is None:
        return None
    import cv2

    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise RequestError(f"mask {path}: expected a readable image file")
    return Mask.from_full(image > 0)


def label_image(masks: Sequence[Mask]) -> Any:
    """Return uint16 [h, w] with the number of the smallest mask around each pixel, counted from 1; 0 outside."""
    import numpy as np

    labels = np.zeros(masks[0].size, np.uint16)
    for number in sorted(range(len(masks)), key=lambda number: -masks[number].area):
        labels[masks[number].full()] = number + 1
    return labels


def write_image(path: Path, image: Any) -> None:
    """Write an image as PNG. Raises OutputError."""
    import cv2

    try:
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error

"""What each verb of the command line does. Heavy imports happen inside the verb that needs them."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutputError, RequestError, require
from ..processes.signals import stop_on_signals
from ..settings import Settings

if TYPE_CHECKING:
    from ..client import PerceptionClient, Segmentation
    from ..detection.phrase_encoder import PhraseEncoder
    from ..detection.vocabulary import Vocabulary
    from ..types import Mask

CONTROL_TIMEOUT_MS = 3000


def run(args: Namespace, settings: Settings) -> None:
    """Serve as the node until a signal."""
    # before torch: threads that spin for long at barriers take the cores from cameras; asleep at once
    # (OMP_WAIT_POLICY=PASSIVE), two of them are no faster than one
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    require("torch", "node")
    require("transformers", "node")
    from ..node.node import Node

    with Node(settings) as node:
        # not before it is ready: until then there is no frame to finish, and a signal simply ends the process
        node.main_loop(stop_on_signals())


def camera(args: Namespace, settings: Settings) -> None:
    """Publish frames until a signal, or the end of the source."""
    from ..cameras.publish import run_camera

    run_camera(settings, stop_on_signals())


def watch(args: Namespace, settings: Settings) -> None:
    """Show masks until a signal."""
    from .watch import run_watch

    run_watch(settings, args.overlay, args.frames, stop_on_signals())


def record(args: Namespace, settings: Settings) -> None:
    """Write down what cameras and node send until a signal."""
    from ..recording.recorder import run_record

    run_record(settings, stop_on_signals())


def demo(args: Namespace, settings: Settings) -> None:
    """Play the demonstration."""
    from .demo import run_demo

    run_demo(args.out, args.seconds, settings)


def doctor(args: Namespace, settings: Settings) -> int:
    """Report what is installed; 0 when the core works."""
    from .doctor import run_doctor

    return run_doctor(settings)


def _client(settings: Settings) -> PerceptionClient:
    from ..client import PerceptionClient

    return PerceptionClient(
        settings.transport.masks, settings.transport.control, timeout_ms=CONTROL_TIMEOUT_MS
    )


def object_add(args: Namespace, settings: Settings) -> None:
    """Track an object and print its id, alone on the line, so that a script can take it."""
    with _client(settings) as client:
        print(client.add_object(**_prompt(args), mask=_read_mask(args.mask), label=args.label).id)


def object_refine(args: Namespace, settings: Settings) -> None:
    """Correct an object and tell of its mask."""
    with _client(settings) as client:
        print(_describe(client.refine_object(args.id, **_prompt(args), mask=_read_mask(args.mask))))


def object_remove(args: Namespace, settings: Settings) -> None:
    """Forget an object."""
    with _client(settings) as client:
        client.remove_object(args.id, camera=args.camera)


def object_list(args: Namespace, settings: Settings) -> None:
    """Print a line for each object."""
    with _client(settings) as client:
        objects = client.list_objects(camera=args.camera)
    for known in objects:
        unseen = f"  unseen for {known.frames_since_seen}" if known.frames_since_seen else ""
        print(
            f"{known.camera:<12} {known.id:>4}  {known.label:<24} {known.state:<10} "
            f"score {known.score:.2f}  age {known.age}{unseen}"
        )


def segment(args: Namespace, settings: Settings) -> None:
    """Print, and maybe write, a mask on a recent frame."""
    with _client(settings) as client:
        found = client.segment(**_prompt(args))
    print(_describe(found))
    if args.out is not None:
        _write_mask(args.out, found.mask)


def set_prompts(args: Namespace, settings: Settings) -> None:
    """Name what to look for."""
    with _client(settings) as client:
        client.set_prompts(args.names, scores=dict(args.score), most=dict(args.most))


def vocabulary_build(args: Namespace, settings: Settings) -> None:
    """Write a vocabulary file and tell what is in it."""
    require("safetensors", "node")
    from ..detection.vocabulary_build import build_vocabulary, read_phrases, read_source

    phrases = [*args.phrases, *(read_phrases(args.phrase_file) if args.phrase_file else [])]
    sources = [read_source(path, args.model) for path in args.sources]
    built = build_vocabulary(phrases, sources, _encoder(args.encoder, args.model))
    built.save(args.out)
    print(_summary(args.out, built))


def vocabulary_list(args: Namespace, settings: Settings) -> None:
    """Print what a vocabulary is of, then its phrases, one a line."""
    require("safetensors", "node")
    from ..detection.vocabulary import Vocabulary

    found = Vocabulary.load(args.file)
    print(_summary(args.file, found))
    print(*found.phrases, sep="\n")


def weights_convert(args: Namespace, settings: Settings) -> None:
    """Convert a checkpoint and tell what it holds."""
    for module in ("torch", "transformers", "safetensors"):
        require(module, "node")
    from ..models.yolo.convert import convert_checkpoint

    model = convert_checkpoint(args.file, args.out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{args.out}: YOLO-World, {millions:.1f} M parameters, phrase vectors of {model.config.text_channels}"
    )


def status(args: Namespace, settings: Settings) -> None:
    """Print the node's status as JSON."""
    with _client(settings) as client:
        print(json.dumps(client.status(), indent=2))


def pause(args: Namespace, settings: Settings) -> None:
    """Stop the node's processing of frames."""
    with _client(settings) as client:
        client.pause()


def resume(args: Namespace, settings: Settings) -> None:
    """Let the node process frames again."""
    with _client(settings) as client:
        client.resume()


def reset(args: Namespace, settings: Settings) -> None:
    """Forget all objects, of one camera or of all."""
    with _client(settings) as client:
        client.reset(camera=args.camera)


def _encoder(folder: Path | None, model: str | None) -> PhraseEncoder | None:
    """The text encoder in a folder, where one is given."""
    if folder is None:
        return None
    require("torch", "node")
    require("transformers", "node")
    from ..detection.clip_text import ClipText

    return ClipText(folder, model=model)


def _summary(path: Path, known: Vocabulary) -> str:
    return f"{path}: {len(known)} phrases, model {known.model}, dimension {known.dimension}"


def _describe(found: Segmentation) -> str:
    box = ",".join(map(str, found.mask.box))
    return f"seq {found.seq}  score {found.score:.3f}  area {found.mask.area}  box {box}"


def _prompt(args: Namespace) -> dict[str, Any]:
    points, labels = [*args.point, *args.exclude], [1] * len(args.point) + [0] * len(args.exclude)
    return {
        "points": points or None,
        "labels": labels or None,
        "box": args.box,
        "seq": args.seq,
        "camera": args.camera,
    }


def _read_mask(path: Path | None) -> Mask | None:
    """An image file whose non-zero pixels are inside."""
    if path is None:
        return None
    import cv2

    from ..types import Mask

    image = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    if image is None:
        raise RequestError(f"mask {path}: expected an image file, found none that can be read")
    return Mask.from_full(image > 0)


def _write_mask(path: Path, mask: Mask) -> None:
    import cv2

    done, encoded = cv2.imencode(".png", mask.full().astype("uint8") * 255)
    try:
        path.write_bytes(encoded.tobytes() if done else b"")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error

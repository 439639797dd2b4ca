"""The operations of the control socket, each a function of the node and its arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from .errors import RequestError, Sam3NodeError, WireError
from .pipeline import Answer, Pipeline
from .prompts import FramePrompt
from .types import MaskEncoding
from .wire import Failure, Fields, Reply, Request, decode_mask, encode_mask

log = logging.getLogger(__name__)

MAX_LABEL = 256
LEAST_SCORE = 0.01  # below it everything would be everywhere
PROMPT = ("camera", "seq", "points", "labels", "box", "mask")


class Served(Protocol):
    """What the operations need of the node."""

    paused: bool

    @property
    def pipelines(self) -> Mapping[str, Pipeline]:
        """One for each camera that is served."""

    @property
    def mask_encoding(self) -> MaskEncoding: ...

    def look_for(
        self, phrases: Sequence[object], scores: Mapping[str, float], most: Mapping[str, int]
    ) -> tuple[str, ...]: ...

    def status(self) -> dict[str, Any]: ...


def answer(node: Served, request: Request) -> Reply:
    """Carry out a request. Whatever it holds, and whatever goes wrong, there is a reply."""
    try:
        return Reply(request.id, _carry_out(node, request))
    except WireError as error:
        return Reply.failed(request.id, RequestError(str(error)))
    except Sam3NodeError as error:
        return Reply.failed(request.id, error)
    except Exception as error:
        log.exception("control: %s failed", request.op)
        message = f"{request.op} failed in the node: {type(error).__name__}: {error}; see its log"
        return Reply(request.id, error=Failure("internal", message))


def _carry_out(node: Served, request: Request) -> Any:
    if request.op not in OPERATIONS:
        raise RequestError(f"unknown operation {request.op!r:.60}: expected one of {', '.join(OPERATIONS)}")
    operation, known = OPERATIONS[request.op]
    args = Fields(request.args, request.op)
    unknown = sorted(set(args.names()) - set(known))
    if unknown:
        raise RequestError(
            f"{request.op}: unknown argument {unknown[0]!r:.60}; expected {', '.join(known) or 'none'}"
        )
    return operation(node, args)


def _add_object(node: Served, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(node, args)
    label = args.text("label") if args.has("label") else "object"
    if len(label) > MAX_LABEL:
        raise RequestError(f"label: expected at most {MAX_LABEL} characters, found {len(label)}")
    added = pipeline.add(_prompt(args), label, _seq(args))
    return {"id": added.id, "camera": pipeline.camera, **_described(added.answer, node)}


def _refine_object(node: Served, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(node, args)
    object_id = args.integer("id")
    found = pipeline.refine(object_id, _prompt(args), _seq(args))
    return {"id": object_id, "camera": pipeline.camera, **_described(found, node)}


def _remove_object(node: Served, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(node, args)
    pipeline.remove(args.integer("id"))
    return {"id": args.integer("id"), "camera": pipeline.camera}


def _list_objects(node: Served, args: Fields) -> dict[str, Any]:
    objects = [
        {"camera": pipeline.camera, **asdict(known)}
        for pipeline in _pipelines(node, args)
        for known in pipeline.objects
    ]
    return {"objects": objects}


def _segment(node: Served, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(node, args)
    found = pipeline.segment(_prompt(args), _seq(args))
    return {"camera": pipeline.camera, **_described(found, node)}


def _set_prompts(node: Served, args: Fields) -> dict[str, Any]:
    prompts = args.texts("prompts")
    scores = args.fields("scores") if args.has("scores") else Fields({}, "scores")
    most = args.fields("most") if args.has("most") else Fields({}, "most")
    used = node.look_for(
        prompts,
        {name: scores.number(name, LEAST_SCORE, 1.0) for name in scores.names()},
        {name: most.integer(name, 1) for name in most.names()},
    )
    return {"prompts": list(used)}


def _reset(node: Served, args: Fields) -> dict[str, Any]:
    for pipeline in _pipelines(node, args):
        pipeline.reset()
    return {}


def _pause(node: Served, args: Fields) -> dict[str, Any]:
    node.paused = True
    return {"paused": True}


def _resume(node: Served, args: Fields) -> dict[str, Any]:
    node.paused = False
    return {"paused": False}


def _status(node: Served, args: Fields) -> dict[str, Any]:
    return node.status()


OPERATIONS: dict[str, tuple[Callable[[Served, Fields], Any], tuple[str, ...]]] = {
    "add_object": (_add_object, (*PROMPT, "label")),
    "refine_object": (_refine_object, ("id", *PROMPT)),
    "remove_object": (_remove_object, ("id", "camera")),
    "list_objects": (_list_objects, ("camera",)),
    "segment": (_segment, PROMPT),
    "set_prompts": (_set_prompts, ("prompts", "scores", "most")),
    "reset": (_reset, ("camera",)),
    "pause": (_pause, ()),
    "resume": (_resume, ()),
    "status": (_status, ()),
}


def _pipelines(node: Served, args: Fields) -> list[Pipeline]:
    return [_pipeline(node, args)] if args.has("camera") else list(node.pipelines.values())


def _pipeline(node: Served, args: Fields) -> Pipeline:
    """That of the camera named; of the only one where none is named."""
    cameras = ", ".join(node.pipelines) or "none yet"
    if args.has("camera"):
        camera = args.text("camera")
        if camera not in node.pipelines:
            raise RequestError(
                f"no camera {camera!r:.60}: expected one that has sent frames, which are {cameras}"
            )
        return node.pipelines[camera]
    if len(node.pipelines) != 1:
        raise RequestError(f"camera: expected to be named unless exactly one sends frames, found {cameras}")
    return next(iter(node.pipelines.values()))


def _prompt(args: Fields) -> FramePrompt:
    mask = decode_mask(args.any("mask"), f"{args.what}: mask") if args.has("mask") else None
    return FramePrompt(args.any("points"), args.any("labels"), args.any("box"), mask)


def _seq(args: Fields) -> int | None:
    return args.integer("seq") if args.has("seq") else None


def _described(found: Answer | None, node: Served) -> dict[str, Any]:
    if found is None:
        return {}
    return {"seq": found.seq, "mask": encode_mask(found.mask, node.mask_encoding), "score": found.score}

"""The operations of the control socket, each a function of the node and its arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ..errors import RequestError, Sam3NodeError, WireError
from ..perception.perception import Perception
from ..perception.pipeline import Answer, Pipeline
from ..perception.prompts import FramePrompt
from ..wire import Failure, Fields, Reply, Request, decode_mask, encode_mask

log = logging.getLogger(__name__)

MAX_LABEL = 256
MIN_SCORE = 0.01  # below it everything would be everywhere
INTERNAL = "internal"
PROMPT = ("camera", "seq", "points", "labels", "box", "mask")


class Host(Protocol):
    """What the operations need of the node."""

    @property
    def perception(self) -> Perception: ...

    def status(self) -> dict[str, Any]: ...

    def describe(self) -> dict[str, Any]: ...


def answer(host: Host, request: Request) -> Reply:
    """Carry out a request. Whatever it holds, and whatever goes wrong, there is a reply."""
    try:
        if request.op in ABOUT:
            _known_arguments(request.op, request.args, ())
            return Reply(request.id, ABOUT[request.op](host))
        return Reply(request.id, carry_out(host.perception, request.op, request.args))
    except WireError as error:
        return Reply.failed(request.id, RequestError(str(error)))
    except Sam3NodeError as error:
        return Reply.failed(request.id, error)
    except Exception as error:
        log.exception("control: %s failed", request.op)
        message = f"{request.op} failed in the node: {type(error).__name__}: {error}; see its log"
        return Reply(request.id, error=Failure(INTERNAL, message))


def carry_out(perception: Perception, op: str, args: Mapping[str, Any]) -> Any:
    """The result of one of CHANGES or QUESTIONS. Raises RequestError and its kin, or WireError for wrong arguments."""
    if op not in CHANGES and op not in QUESTIONS:
        raise RequestError(f"unknown operation {op!r:.60}: expected one of {', '.join(OPERATIONS)}")
    operation, known = CHANGES[op] if op in CHANGES else QUESTIONS[op]
    return operation(perception, _known_arguments(op, args, known))


def changed(request: Request, reply: Reply) -> bool:
    """Whether a request has, or may have, changed what the node does from now on."""
    return request.op in CHANGES and (reply.error is None or reply.error.code == INTERNAL)


def _known_arguments(op: str, args: Mapping[str, Any], known: Sequence[str]) -> Fields:
    fields = Fields(dict(args), op)
    unknown = sorted(set(fields.names()) - set(known))
    if unknown:
        raise RequestError(
            f"{op}: unknown argument {unknown[0]!r:.60}; expected {', '.join(known) or 'none'}"
        )
    return fields


def _add_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    label = args.text("label") if args.has("label") else "object"
    if len(label) > MAX_LABEL:
        raise RequestError(f"label: expected at most {MAX_LABEL} characters, found {len(label)}")
    added = pipeline.add(_prompt(args), label, _seq(args))
    return {"id": added.id, "camera": pipeline.camera, **_described(added.answer, perception)}


def _refine_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    object_id = args.integer("id")
    found = pipeline.refine(object_id, _prompt(args), _seq(args))
    return {"id": object_id, "camera": pipeline.camera, **_described(found, perception)}


def _remove_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    pipeline.remove(args.integer("id"))
    return {"id": args.integer("id"), "camera": pipeline.camera}


def _list_objects(perception: Perception, args: Fields) -> dict[str, Any]:
    objects = [
        {"camera": pipeline.camera, **asdict(known)}
        for pipeline in _pipelines(perception, args)
        for known in pipeline.objects
    ]
    return {"objects": objects}


def _segment(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    found = pipeline.segment(_prompt(args), _seq(args))
    return {"camera": pipeline.camera, **_described(found, perception)}


def _set_prompts(perception: Perception, args: Fields) -> dict[str, Any]:
    prompts = args.texts("prompts")
    scores = args.fields("scores") if args.has("scores") else Fields({}, "scores")
    most = args.fields("most") if args.has("most") else Fields({}, "most")
    used = perception.set_prompts(
        prompts,
        {name: scores.number(name, MIN_SCORE, 1.0) for name in scores.names()},
        {name: most.integer(name, 1) for name in most.names()},
    )
    return {"prompts": list(used)}


def _reset(perception: Perception, args: Fields) -> dict[str, Any]:
    for pipeline in _pipelines(perception, args):
        pipeline.reset()
    return {}


def _pause(perception: Perception, args: Fields) -> dict[str, Any]:
    perception.paused = True
    return {"paused": True}


def _resume(perception: Perception, args: Fields) -> dict[str, Any]:
    perception.paused = False
    return {"paused": False}


Operation = Callable[[Perception, Fields], Any]

CHANGES: dict[str, tuple[Operation, tuple[str, ...]]] = {
    "add_object": (_add_object, (*PROMPT, "label")),
    "refine_object": (_refine_object, ("id", *PROMPT)),
    "remove_object": (_remove_object, ("id", "camera")),
    "set_prompts": (_set_prompts, ("prompts", "scores", "most")),
    "reset": (_reset, ("camera",)),
    "pause": (_pause, ()),
    "resume": (_resume, ()),
}
QUESTIONS: dict[str, tuple[Operation, tuple[str, ...]]] = {
    "list_objects": (_list_objects, ("camera",)),
    "segment": (_segment, PROMPT),
}
ABOUT: dict[str, Callable[[Host], Any]] = {
    "status": lambda host: host.status(),
    "describe": lambda host: host.describe(),
}
OPERATIONS = (*CHANGES, *QUESTIONS, *ABOUT)


def _pipelines(perception: Perception, args: Fields) -> list[Pipeline]:
    return [_pipeline(perception, args)] if args.has("camera") else list(perception.pipelines.values())


def _pipeline(perception: Perception, args: Fields) -> Pipeline:
    """That of the camera named; of the only one where none is named."""
    cameras = ", ".join(perception.pipelines) or "none yet"
    if args.has("camera"):
        camera = args.text("camera")
        if camera not in perception.pipelines:
            raise RequestError(
                f"no camera {camera!r:.60}: expected one that has sent frames, which are {cameras}"
            )
        return perception.pipelines[camera]
    if len(perception.pipelines) != 1:
        raise RequestError(f"camera: expected to be named unless exactly one sends frames, found {cameras}")
    return next(iter(perception.pipelines.values()))


def _prompt(args: Fields) -> FramePrompt:
    mask = decode_mask(args.any("mask"), f"{args.what}: mask") if args.has("mask") else None
    return FramePrompt(args.any("points"), args.any("labels"), args.any("box"), mask)


def _seq(args: Fields) -> int | None:
    return args.integer("seq") if args.has("seq") else None


def _described(found: Answer | None, perception: Perception) -> dict[str, Any]:
    if found is None:
        return {}
    return {"seq": found.seq, "mask": encode_mask(found.mask, perception.mask_encoding), "score": found.score}

"""The operations of the control socket for snapshots and hand-overs. They publish their own events.

The operations of the control socket. Each is a function of the perception core and the request's arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, get_args

from ..detection.phrases import clean_label
from ..engines.oom import find_device_error
from ..errors import RequestError, Sam3NodeError, UnknownObjectError, WireError, did_you_mean
from ..perception.catch_up import MAX_STRIDE
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..perception.prompts import FramePrompt, PromptResult
from ..tracking.everything import EverythingOptions
from ..types import Job, Priority, run_to_end
from ..wire import INTERNAL_ERROR, Failure, Fields, Reply, Request, decode_mask, encode_mask
from .saved_state import Snapshots

MAX_LINE_CHARACTERS = 200


def _snapshot(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return {"snapshot": snapshots.begin(args.text("name") if args.has("name") else None)}


def _read_snapshot(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return snapshots.read(args.integer("snapshot"), args.integer("offset"))


def _restore(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    return snapshots.restore_named(args.text("name")).describe()


def _hand_over(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    """Hand over. A taker of before `confirm_hand_over` names neither itself nor a token."""
    taker = _checked_line(args, "taker") if args.has("taker") else None
    token = _checked_line(args, "token") if taker is not None else ""
    return {"snapshot": snapshots.hand_over(taker, token)}


def _confirm_hand_over(snapshots: Snapshots, args: Fields) -> dict[str, Any]:
    accepted = args.flag("accepted") if args.has("accepted") else True
    state = snapshots.confirm_hand_over(_checked_line(args, "token"), accepted)
    return {"state": state, "node": snapshots.node}


def _checked_line(args: Fields, name: str) -> str:
    """Return a text for logs and probes: one line, printable and not too long."""
    text = args.text(name)
    if not 0 < len(text) <= MAX_LINE_CHARACTERS or not text.isprintable():
        raise RequestError(
            f"{args.what}: {name}: expected 1 to {MAX_LINE_CHARACTERS} printable characters, found {text!r:.80}"
        )
    return text


SNAPSHOT_OPERATIONS: dict[str, tuple[Callable[[Snapshots, Fields], Any], tuple[str, ...]]] = {
    "snapshot": (_snapshot, ("name",)),
    "read_snapshot": (_read_snapshot, ("snapshot", "offset")),
    "restore": (_restore, ("name",)),
    "hand_over": (_hand_over, ("taker", "token")),
    "confirm_hand_over": (_confirm_hand_over, ("token", "accepted")),
}


log = logging.getLogger(__name__)

MIN_SCORE = 0.01  # with a lower threshold, nearly every box would be a detection
EVERYTHING_SHARES = ("min_iou", "min_stability", "max_overlap")
DEFAULT_POINTS, MAX_POINTS = 1000, 10_000
PROMPT_ARGUMENTS = ("camera", "seq", "points", "labels", "box", "mask")


class OperationHost(Protocol):
    """The part of the node that the operations use."""

    @property
    def perception(self) -> Perception: ...

    @property
    def snapshots(self) -> Snapshots: ...

    def status(self) -> dict[str, Any]: ...

    def describe(self) -> dict[str, Any]: ...


def handle_request(host: OperationHost, request: Request) -> Job[Reply]:
    """Carry out a request, in one turn or more, and return the reply. Every error becomes an error reply."""
    reply = yield from _make_reply(host, request)
    session = host.perception.session
    return reply._replace(node=session.node if session else None)


def _make_reply(host: OperationHost, request: Request) -> Job[Reply]:
    try:
        if request.op in NODE_QUERIES:
            _checked_arguments(request.op, request.args, ())
            return Reply(request.id, NODE_QUERIES[request.op](host))
        if request.op in SNAPSHOT_OPERATIONS:
            operation, allowed = SNAPSHOT_OPERATIONS[request.op]
            args = _checked_arguments(request.op, request.args, allowed)
            return Reply(request.id, operation(host.snapshots, args))
        if request.op in CHANGES and request.op != "resume":
            host.snapshots.hand_over_state.check_idle()  # the taker would not know the change
        result = _begin(host.perception, request.op, request.args)
        if request.op == "resume":
            host.snapshots.take_back()
        return Reply(request.id, (yield from result) if isinstance(result, Generator) else result)
    except WireError as error:
        return Reply.failed(request.id, RequestError(str(error)))
    except Sam3NodeError as error:
        return Reply.failed(request.id, error)
    except Exception as error:
        if lost := find_device_error(error):
            return Reply.failed(request.id, lost)
        log.exception("control: %s failed", request.op)
        message = f"{request.op} failed in the node: {type(error).__name__}: {error}; see its log"
        return Reply(request.id, error=Failure(INTERNAL_ERROR, message))


def carry_out(perception: Perception, op: str, args: Mapping[str, Any]) -> Any:
    """Run an operation of CHANGES or QUERIES, all turns of it, and return its result.

    Raises RequestError or a subclass, or WireError for arguments of the wrong type.
    """
    result = _begin(perception, op, args)
    return run_to_end(result) if isinstance(result, Generator) else result


def _begin(perception: Perception, op: str, args: Mapping[str, Any]) -> Any:
    """Run an operation and return its result, or the turns of its work."""
    if op not in CHANGES and op not in QUERIES:
        raise RequestError(
            f"unknown operation {op!r:.60}: expected one of {', '.join(OPERATIONS)}{did_you_mean(op[:60], OPERATIONS)}"
        )
    operation, allowed = CHANGES[op] if op in CHANGES else QUERIES[op]
    return operation(perception, _checked_arguments(op, args, allowed))


def find_topic(request: Request) -> str | None:
    """Return the text that a newer request has in common with an older one that it makes useless, or None.

    To segment changes nothing, so only the newest request of a client for a camera matters.
    """
    camera = request.args.get("camera")
    segments = request.op in ("segment", "segment_everything") and isinstance(camera, str | None)
    return f"{request.op} {camera!r}" if segments else None


def describe_change(request: Request, reply: Reply) -> dict[str, Any] | None:
    """Return the arguments of a request for its event, so that it can be repeated in another session.

    The camera that the request was applied to and the stride of an object that catches up are added, and the epoch is
    left out. None if the request has surely changed nothing that the node does afterwards.
    """
    if request.op not in CHANGES or (reply.error is not None and reply.error.code != INTERNAL_ERROR):
        return None
    args = {name: value for name, value in request.args.items() if name != "epoch"}
    result = reply.result if isinstance(reply.result, dict) else {}
    return args | {name: result[name] for name in ("camera", "stride") if name in result}


def _checked_arguments(op: str, args: Mapping[str, Any], allowed: Sequence[str]) -> Fields:
    fields = Fields(dict(args), op)
    unknown = sorted(set(fields.names()) - set(allowed))
    if unknown:
        raise RequestError(
            f"{op}: unknown argument {unknown[0]!r:.60}; expected {', '.join(allowed) or 'none'}"
        )
    return fields


def _add_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    label = clean_label(args.text("label") if args.has("label") else "")
    age = _check_age(perception, pipeline, args)
    priority: Priority = args.choice("priority", get_args(Priority)) if args.has("priority") else "normal"
    added = pipeline.add(_prompt(args, pipeline), label, _seq(args), priority, _stride(args))
    way = _describe_way(pipeline, added.id)
    return {"id": added.id, **_origin(pipeline), **age, **way, **_describe_result(added.result, perception)}


def _refine_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    object_id = args.integer("id")
    age = _check_age(perception, pipeline, args)
    result = pipeline.refine(object_id, _prompt(args, pipeline), _seq(args), _stride(args))
    way = _describe_way(pipeline, object_id)
    return {"id": object_id, **_origin(pipeline), **age, **way, **_describe_result(result, perception)}


def _remove_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    pipeline.remove(args.integer("id"))
    return {"id": args.integer("id"), **_origin(pipeline)}


def _rename_object(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    label = clean_label(args.text("label"))
    pipeline.rename(args.integer("id"), label)
    return {"id": args.integer("id"), "label": label, **_origin(pipeline)}


def _list_objects(perception: Perception, args: Fields) -> dict[str, Any]:
    objects = [
        {**_origin(pipeline), **_silence(perception, pipeline), **asdict(status)}
        for pipeline in _pipelines(perception, args)
        for status in pipeline.objects
    ]
    return {"objects": objects}


def _segment(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    age = _check_age(perception, pipeline, args)
    result = pipeline.queries.segment(_prompt(args, pipeline), _seq(args))
    return {**_origin(pipeline), **age, **_describe_result(result, perception)}


def _segment_everything(perception: Perception, args: Fields) -> Job[dict[str, Any]]:
    """Find everything on a frame. One such search is under way at a time, because its candidates take much memory."""
    chosen: dict[str, Any] = {name: args.integer(name) for name in ("grid", "most") if args.has(name)}
    chosen |= {name: args.number(name) for name in EVERYTHING_SHARES if args.has(name)}
    tracker = perception.settings.tracker
    limits = {
        "min_iou": tracker.everything_min_iou or None,
        "min_stability": tracker.everything_min_stability or None,
    }
    options = EverythingOptions(**limits | chosen)
    while perception.searching:
        yield
    pipeline = _pipeline(perception, args)
    age = _check_age(perception, pipeline, args)
    perception.searching = True
    try:
        seq, found, note = yield from pipeline.queries.find_everything(options, _seq(args))
    finally:
        perception.searching = False
    masks = [
        {"mask": encode_mask(result.mask, perception.mask_encoding), "score": result.score}
        for result in found
    ]
    if note:
        log.info("camera %s: frame %d: %s", pipeline.camera, seq, note)
    return {**_origin(pipeline), **age, "seq": seq, "masks": masks, **({"note": note} if note else {})}


def _points(perception: Perception, args: Fields) -> dict[str, Any]:
    pipeline = _pipeline(perception, args)
    object_id = args.integer("id")
    count = args.integer("count", 1, MAX_POINTS) if args.has("count") else DEFAULT_POINTS
    known = [status.id for status in pipeline.objects]
    if object_id not in known:
        raise UnknownObjectError(f"no object {object_id}; there are {known or 'none'}")
    found = pipeline.spatial.points(object_id, count)
    if found is None:
        reason = pipeline.spatial.problem or "no mask, a doubtful one, or no valid depth under it"
        raise RequestError(
            f"points: expected object {object_id} with depth on the latest frame, found none: {reason}"
        )
    points = {"seq": found.seq, "frame": found.frame, "points_m": found.points_m.tobytes()}
    return {"id": object_id, **_origin(pipeline), **points}


def _set_prompts(perception: Perception, args: Fields) -> dict[str, Any]:
    prompts = args.texts("prompts")
    scores, max_counts, priorities = (
        args.fields(name) if args.has(name) else Fields({}, name) for name in ("scores", "most", "priorities")
    )
    cleaned = perception.set_prompts(
        prompts,
        {name: scores.number(name, MIN_SCORE, 1.0) for name in scores.names()},
        {name: max_counts.integer(name, 1) for name in max_counts.names()},
        {name: priorities.choice(name, get_args(Priority)) for name in priorities.names()},
    )
    return {"prompts": list(cleaned)}


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
    "add_object": (_add_object, (*PROMPT_ARGUMENTS, "label", "priority", "stride", "epoch")),
    "refine_object": (_refine_object, ("id", *PROMPT_ARGUMENTS, "stride", "epoch")),
    "remove_object": (_remove_object, ("id", "camera", "epoch")),
    "rename_object": (_rename_object, ("id", "label", "camera", "epoch")),
    "set_prompts": (_set_prompts, ("prompts", "scores", "most", "priorities")),
    "reset": (_reset, ("camera",)),
    "pause": (_pause, ()),
    "resume": (_resume, ()),
}
QUERIES: dict[str, tuple[Operation, tuple[str, ...]]] = {
    "list_objects": (_list_objects, ("camera",)),
    "segment": (_segment, PROMPT_ARGUMENTS),
    "segment_everything": (_segment_everything, ("camera", "seq", "grid", *EVERYTHING_SHARES, "most")),
    "points": (_points, ("id", "count", "camera", "epoch")),
}
NODE_QUERIES: dict[str, Callable[[OperationHost], Any]] = {
    "status": lambda host: host.status(),
    "describe": lambda host: host.describe(),
}
OPERATIONS = (*CHANGES, *QUERIES, *NODE_QUERIES, *SNAPSHOT_OPERATIONS)


def _pipelines(perception: Perception, args: Fields) -> list[Pipeline]:
    return [_pipeline(perception, args)] if args.has("camera") else list(perception.pipelines.values())


def _pipeline(perception: Perception, args: Fields) -> Pipeline:
    """Return the pipeline of the camera in `args`, or of the only camera that sends if `args` names none.

    Raises NodeRestarted if `args` has the epoch of other ids.
    """
    pipeline = _find_pipeline(perception, args)
    if pipeline is None:
        raise _camera_error(perception, args)
    if perception.session is not None and args.has("epoch"):
        # a new object may go to any camera, an object's id belongs to one
        names_one = args.has("camera") or args.has("id")
        meant = [pipeline] if names_one else perception.pipelines.values()
        perception.session.check_epoch(args.integer("epoch"), [found.epoch for found in meant])
    return pipeline


def _find_pipeline(perception: Perception, args: Fields) -> Pipeline | None:
    pipelines, session = perception.pipelines, perception.session
    if args.has("camera"):
        return pipelines.get(args.text("camera"))
    sending = [camera for camera in pipelines if session is None or session.sends(camera)]
    names = sending or list(pipelines)
    return pipelines[names[0]] if len(names) == 1 else None


def _camera_error(perception: Perception, args: Fields) -> RequestError:
    cameras = ", ".join(perception.pipelines)
    if not cameras:
        return RequestError(f"{args.what}: no camera has sent a frame yet; start one: sam3-node camera …")
    if args.has("camera"):
        camera = args.text("camera")
        return RequestError(f"no camera {camera!r:.60}: expected a camera that has sent frames: {cameras}")
    return RequestError(f"camera: expected a name unless exactly one camera sends frames, found {cameras}")


def _origin(pipeline: Pipeline) -> dict[str, Any]:
    """Return the fields that say whose ids these are."""
    epoch = {} if pipeline.epoch is None else {"epoch": pipeline.epoch}
    return {"camera": pipeline.camera, **epoch}


def _silence(perception: Perception, pipeline: Pipeline) -> dict[str, Any]:
    silent_s = perception.session.silent_s(pipeline.camera) if perception.session else None
    return {} if silent_s is None else {"silent_s": round(silent_s, 3)}


def _check_age(perception: Perception, pipeline: Pipeline, args: Fields) -> dict[str, Any]:
    """Return the age of the frame that a prompt applies to; UnknownFrameError if it is too old.

    An object that enters on the next frame needs a camera that sends. While the node is paused, frames may be old.
    """
    session = perception.session
    if session is None:
        return {}
    if args.what == "add_object" and not args.has("seq"):
        if not perception.paused:
            session.check_next_frame(pipeline.camera)
        return {}
    age_ms = session.prompt_age_ms(pipeline.queries.age_origin_ns(_seq(args)))
    if not perception.paused:
        session.check_prompt_age(pipeline.camera, age_ms)
    return {} if age_ms is None else {"age_ms": age_ms}


def _prompt(args: Fields, pipeline: Pipeline) -> FramePrompt:
    mask = None
    if args.has("mask"):
        size = pipeline.queries.frame_size(_seq(args))
        mask = decode_mask(args.any("mask"), f"{args.what}: mask", frame_size=size)
    return FramePrompt(args.any("points"), args.any("labels"), args.any("box"), mask)


def _seq(args: Fields) -> int | None:
    return args.integer("seq") if args.has("seq") else None


def _stride(args: Fields) -> int | None:
    return args.integer("stride", 1, MAX_STRIDE) if args.has("stride") else None


def _describe_way(pipeline: Pipeline, object_id: int) -> dict[str, int]:
    """Return the stride of an object that catches up, unless it is 1."""
    stride = pipeline.catch_ups.get_stride(object_id)
    return {} if stride is None or stride == 1 else {"stride": stride}


def _describe_result(result: PromptResult | None, perception: Perception) -> dict[str, Any]:
    if result is None:
        return {}
    mask = encode_mask(result.mask, perception.mask_encoding)
    return {"seq": result.seq, "mask": mask, "score": result.score}

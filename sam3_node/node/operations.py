"""Carry out the operations of the control socket: one function of each, called with the values of its arguments."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ..detection.detectors import require_exemplars
from ..detection.phrases import clean_label
from ..engines.oom import find_device_error
from ..errors import CapacityError, RequestError, Sam3NodeError, UnknownObjectError, WireError
from ..perception.perception import Perception
from ..perception.pipeline import Pipeline
from ..perception.prompts import PromptResult
from ..tracking.everything import EverythingOptions
from ..types import Job, Priority, run_to_end
from ..wire import INTERNAL_ERROR, Failure, Reply, Request, encode_mask
from ..wire.frame_prompt import FramePrompt
from ..wire.images import decode_photo
from ..wire.operations import CHANGES, OPERATIONS
from .saved_state import Snapshots

if TYPE_CHECKING:
    from .node import Node

log = logging.getLogger(__name__)

DEFAULT_POINTS = 1000
DEFAULT_LEASE_S = 60.0
MAX_PINNED = 4
"""Pinned frames of all cameras: each takes memory until its lease ends."""


def handle_request(host: Node, request: Request) -> Reply | Job[Reply]:
    """Carry out a request and return its reply, or the job that makes it. Every error becomes an error reply."""
    try:
        values = request.values
        kind = OPERATIONS[request.op].kind
        if kind == "change" and request.op != "resume":
            host.snapshots.hand_over_state.check_idle()  # the successor would not know the change
        subject = {"node": host, "snapshot": host.snapshots}.get(kind, host.perception)
        result = HANDLERS[request.op](subject, **values)
        if request.op == "resume":
            host.snapshots.take_back()
    except Exception as error:
        return _fail(request, error)
    return _reply_later(request, result) if isinstance(result, Generator) else Reply(request.id, result)


def _reply_later(request: Request, job: Job[Any]) -> Job[Reply]:
    try:
        return Reply(request.id, (yield from job))
    except Exception as error:
        return _fail(request, error)


def _fail(request: Request, error: Exception) -> Reply:
    if isinstance(error, WireError):
        error = RequestError(str(error))
    known = error if isinstance(error, Sam3NodeError) else find_device_error(error)
    if known is not None:
        return Reply.failed(request.id, known)
    log.error("control: %s failed", request.op, exc_info=error)
    message = f"{request.op} failed in the node: {type(error).__name__}: {error}; see its log"
    return Reply(request.id, error=Failure(INTERNAL_ERROR, message))


def carry_out(perception: Perception, op: str, args: Mapping[str, Any]) -> Any:
    """Run an operation on perception to its end, and return its result. Raises RequestError or a subclass."""
    result = HANDLERS[op](perception, **Request(0, op, dict(args)).values)
    return run_to_end(result) if isinstance(result, Generator) else result


def describe_change(request: Request, reply: Reply) -> dict[str, Any] | None:
    """Return the arguments of a request for its event, so that it can be repeated in another session.

    The camera that the request was applied to and the stride of an object that catches up are added, and the epoch is
    removed. None if the request has surely changed nothing that the node does afterwards.
    """
    if request.op not in CHANGES or (reply.error is not None and reply.error.code != INTERNAL_ERROR):
        return None
    args = {name: value for name, value in request.args.items() if name != "epoch"}
    result = reply.result if isinstance(reply.result, dict) else {}
    return args | {name: result[name] for name in ("camera", "stride") if name in result}


def _add_object(
    perception: Perception,
    prompt: FramePrompt,
    label: str = "",
    priority: Priority = "normal",
    seq: int | None = None,
    stride: int | None = None,
    choice: int | None = None,
    **place: Any,
) -> dict[str, Any]:
    label = clean_label(label)
    pipeline = _find_pipeline(perception, **place)
    age = {}
    if seq is not None:
        age = _check_age(perception, pipeline, seq)
    elif perception.session is not None and not perception.paused:
        perception.session.check_next_frame(pipeline.camera)  # on which the object enters
    added = pipeline.add(prompt, label, seq, priority, stride, choice)
    return _describe_object(perception, pipeline, added.id, age, added.result)


def _refine_object(
    perception: Perception,
    prompt: FramePrompt,
    id: int,
    seq: int | None = None,
    stride: int | None = None,
    **place: Any,
) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, names_object=True, **place)
    age = _check_age(perception, pipeline, seq)
    result = pipeline.refine(id, prompt, seq, stride)
    return _describe_object(perception, pipeline, id, age, result)


def _pin_frame(
    perception: Perception, seq: int, lease_s: float = DEFAULT_LEASE_S, **place: Any
) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, **place)
    age = _check_age(perception, pipeline, seq)
    pinned = sum(each.cache_usage["pinned_frames"] for each in perception.pipelines.values())
    if lease_s and pinned >= MAX_PINNED and not pipeline.find(seq).lease_ns:
        raise CapacityError(
            f"expected at most {MAX_PINNED} pinned frames, found as many; let one go (lease_s: 0), or wait"
        )
    pipeline.pin(seq, lease_s)
    return {**_origin(pipeline), **age, "seq": seq, "lease_s": lease_s}


def _remove_object(perception: Perception, id: int, **place: Any) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, names_object=True, **place)
    pipeline.remove(id)
    return {"id": id, **_origin(pipeline)}


def _rename_object(perception: Perception, id: int, label: str, **place: Any) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, names_object=True, **place)
    label = clean_label(label)
    pipeline.rename(id, label)
    return {"id": id, "label": label, **_origin(pipeline)}


def _list_objects(perception: Perception, camera: str | None = None) -> dict[str, Any]:
    objects = [
        {**_origin(pipeline), **_silence(perception, pipeline), **asdict(status)}
        for pipeline in _find_pipelines(perception, camera)
        for status in pipeline.objects
    ]
    return {"objects": objects}


def _segment(
    perception: Perception,
    prompt: FramePrompt,
    camera: str | None = None,
    seq: int | None = None,
    multimask: bool = False,
) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, camera)
    reply = {**_origin(pipeline), **_check_age(perception, pipeline, seq)}
    reply |= _describe_result(pipeline.segment(prompt, seq), perception)
    if multimask:
        found = pipeline.candidates(prompt, seq)
        reply["masks"] = [_describe_mask(result, perception) for result in found]
    return reply


def _segment_everything(
    perception: Perception, camera: str | None = None, seq: int | None = None, **chosen: Any
) -> Job[dict[str, Any]]:
    """Find everything on a frame. One such search is under way at a time, because its candidates take much memory."""
    tracker = perception.settings.tracker
    limits = {
        "min_iou": tracker.everything_min_iou or None,
        "min_stability": tracker.everything_min_stability or None,
    }
    options = EverythingOptions(**limits | chosen)
    while perception.searching:
        yield
    pipeline = _find_pipeline(perception, camera)
    age = _check_age(perception, pipeline, seq)
    perception.searching = True
    try:
        seq, results, note = yield from pipeline.find_everything(options, seq)
    finally:
        perception.searching = False
    if note:
        log.info("camera %s: frame %d: %s", pipeline.camera, seq, note)
    masks = [_describe_mask(result, perception) for result in results]
    return {**_origin(pipeline), **age, "seq": seq, "masks": masks, **({"note": note} if note else {})}


def _points(perception: Perception, id: int, count: int = DEFAULT_POINTS, **place: Any) -> dict[str, Any]:
    pipeline = _find_pipeline(perception, names_object=True, **place)
    ids = [status.id for status in pipeline.objects]
    if id not in ids:
        raise UnknownObjectError(f"no object {id}; there are {ids or 'none'}")
    surface = pipeline.points(id, count)
    if surface is None:
        reason = pipeline.problem or "no mask, a doubtful one, or no valid depth under it"
        raise RequestError(
            f"points: expected object {id} with depth on the latest frame, found none: {reason}"
        )
    points = {"seq": surface.seq, "frame": surface.frame, "points_m": surface.points_m.tobytes()}
    return {"id": id, **_origin(pipeline), **points}


def _set_prompts(
    perception: Perception,
    prompts: Sequence[str],
    scores: Mapping[str, float] | None = None,
    most: Mapping[str, int] | None = None,
    priorities: Mapping[str, Priority] | None = None,
) -> dict[str, Any]:
    return {"prompts": list(perception.set_prompts(prompts, scores, most, priorities))}


def _add_exemplar(
    perception: Perception,
    name: str,
    boxes: Sequence[FramePrompt],
    labels: Sequence[int] | None = None,
    text: str = "",
    photo: bytes | None = None,
    seq: int | None = None,
    **place: Any,
) -> dict[str, Any]:
    require_exemplars(perception.detector)
    if photo is None:
        pipeline = _find_pipeline(perception, **place)
        cached = pipeline.find(seq)
        reply = {**_origin(pipeline), **_check_age(perception, pipeline, seq), "seq": cached.seq}
        assert cached.image is not None  # as the detector takes exemplars
        image, view = cached.image.numpy(), f"{pipeline.camera} {cached.seq} {cached.capture_ns}"
    elif place or seq is not None:
        raise RequestError("add_exemplar: expected boxes on a photo, or on a frame (camera, seq), found both")
    else:
        image = decode_photo(photo, perception.settings.tracker.max_frame_pixels)
        reply, view = {}, hashlib.sha256(photo).hexdigest()
    corners = np.array([box.within(image.shape[:2])[1] for box in boxes]).tolist()
    marks = [1] * len(boxes) if labels is None else labels
    phrases = perception.add_exemplar(name, image, place=view, boxes=corners, labels=marks, text=text)
    return {**reply, "prompts": list(phrases)}


def _reset(perception: Perception, camera: str | None = None) -> dict[str, Any]:
    for pipeline in _find_pipelines(perception, camera):
        pipeline.reset()
    return {}


def _set_paused(perception: Perception, paused: bool) -> dict[str, Any]:
    perception.paused = paused
    return {"paused": paused}


def _hand_over(snapshots: Snapshots, taker: str | None = None, token: str | None = None) -> dict[str, Any]:
    """Hand over. A successor that names neither itself nor a token is confirmed at once."""
    if taker is None:
        token = ""
    elif token is None:
        raise RequestError("hand_over: expected 'token' to be a string, found nothing")
    return {"snapshot": snapshots.hand_over(taker, token)}


def _confirm_hand_over(snapshots: Snapshots, token: str, accepted: bool = True) -> dict[str, Any]:
    return {"state": snapshots.confirm_hand_over(token, accepted), "node": snapshots.node}


HANDLERS: dict[str, Callable[..., Any]] = {
    "add_object": _add_object,
    "refine_object": _refine_object,
    "pin_frame": _pin_frame,
    "remove_object": _remove_object,
    "rename_object": _rename_object,
    "set_prompts": _set_prompts,
    "add_exemplar": _add_exemplar,
    "reset": _reset,
    "pause": lambda perception: _set_paused(perception, True),
    "resume": lambda perception: _set_paused(perception, False),
    "list_objects": _list_objects,
    "segment": _segment,
    "segment_everything": _segment_everything,
    "points": _points,
    "status": lambda host: host.status(),
    "describe": lambda host: host.describe(),
    "snapshot": lambda snapshots, name=None: {"snapshot": snapshots.begin(name)},
    "read_snapshot": lambda snapshots, snapshot, offset: snapshots.read(snapshot, offset),
    "restore": lambda snapshots, name: snapshots.restore_named(name).describe(),
    "hand_over": _hand_over,
    "confirm_hand_over": _confirm_hand_over,
}
"""The function of each operation. Its first argument is perception, the node or its snapshots, by the kind."""


def _find_pipelines(perception: Perception, camera: str | None) -> list[Pipeline]:
    return list(perception.pipelines.values()) if camera is None else [_find_pipeline(perception, camera)]


def _find_pipeline(
    perception: Perception, camera: str | None = None, epoch: int | None = None, names_object: bool = False
) -> Pipeline:
    """Return the pipeline of the camera, or of the only camera that sends if none is named.

    Raises NodeRestarted if `epoch` is the epoch of other ids. A new object may go to any camera, but an object's id
    belongs to one.
    """
    pipelines, session = perception.pipelines, perception.session
    if camera is None:
        sending = [name for name in pipelines if session is None or session.sends(name)]
        names = sending or list(pipelines)
        pipeline = pipelines[names[0]] if len(names) == 1 else None
    else:
        pipeline = pipelines.get(camera)
    if pipeline is None:
        raise _camera_error(", ".join(pipelines), camera)
    if session is not None and epoch is not None:
        is_clear = names_object or camera is not None
        meant = [pipeline] if is_clear else pipelines.values()
        session.check_epoch(epoch, [candidate.epoch for candidate in meant])
    return pipeline


def _camera_error(cameras: str, camera: str | None) -> RequestError:
    if not cameras:
        return RequestError("no camera has sent a frame yet; start one: sam3-node camera …")
    if camera is not None:
        return RequestError(f"no camera {camera!r:.60}: expected a camera that has sent frames: {cameras}")
    return RequestError(f"camera: expected a name unless exactly one camera sends frames, found {cameras}")


def _origin(pipeline: Pipeline) -> dict[str, Any]:
    """Return the camera and the epoch that ids belong to."""
    epoch = {} if pipeline.epoch is None else {"epoch": pipeline.epoch}
    return {"camera": pipeline.camera, **epoch}


def _silence(perception: Perception, pipeline: Pipeline) -> dict[str, Any]:
    silent_s = perception.session.silent_s(pipeline.camera) if perception.session else None
    return {} if silent_s is None else {"silent_s": round(silent_s, 3)}


def _check_age(perception: Perception, pipeline: Pipeline, seq: int | None) -> dict[str, Any]:
    """Return the age of the frame that a prompt applies to; UnknownFrameError if it is too old.

    While the node is paused, frames may be old, and so may pinned ones.
    """
    session = perception.session
    if session is None:
        return {}
    cached = pipeline.find(seq)
    age_ms = session.prompt_age_ms(cached.age_origin_ns)
    if not perception.paused and not cached.lease_ns:
        session.check_prompt_age(pipeline.camera, age_ms)
    return {} if age_ms is None else {"age_ms": age_ms}


def _describe_object(
    perception: Perception,
    pipeline: Pipeline,
    object_id: int,
    age: Mapping[str, Any],
    result: PromptResult | None,
) -> dict[str, Any]:
    """Return the id and the mask of a prompted object, and its stride if it catches up with another one than 1."""
    stride = pipeline.get_stride(object_id)
    origin = {
        "id": object_id,
        **_origin(pipeline),
        **age,
        **({} if stride in (None, 1) else {"stride": stride}),
    }
    return origin | _describe_result(result, perception)


def _describe_result(result: PromptResult | None, perception: Perception) -> dict[str, Any]:
    return {} if result is None else {"seq": result.seq, **_describe_mask(result, perception)}


def _describe_mask(result: PromptResult, perception: Perception) -> dict[str, Any]:
    return {"mask": encode_mask(result.mask, perception.mask_encoding), "score": result.score}

"""Carry out the operations of the control socket: one function of each."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar, assert_never, cast

import numpy as np
from msgspec.structs import asdict, replace

from ..detection.detectors import find_known_names, require_exemplars
from ..detection.phrases import clean_label
from ..engines.oom import find_device_error
from ..errors import (
    CapacityError,
    NoCameraError,
    RequestError,
    Sam3NodeError,
    UnknownObjectError,
    WireError,
)
from ..perception.perception import Perception
from ..perception.photo_search import PhotoSearch
from ..perception.picks.picking import PickLimits, rank_picks
from ..perception.picks.scene import describe_container, list_boxes
from ..perception.pipeline import Pipeline
from ..perception.prompts import PromptResult
from ..perception.step import BASE
from ..resumable import Resumable, run_to_end
from ..schema import operations as ops
from ..schema import replies
from ..schema.fields import MAX_ITEMS
from ..schema.operations import Operation
from ..schema.replies import OperationReply, ReplyT
from ..schema.values import MaskMap
from ..tracking.everything import DEFAULT_GRID, DEFAULT_MASKS, DEFAULT_OVERLAP, EverythingOptions
from ..wire import INTERNAL_ERROR, Failure, Reply, Request
from ..wire.images import MAX_PHOTO_FILE
from ..wire.requests import make_frame_prompt, pack_mask, read_prompt
from .episodes import Episodes
from .photos import Photo, read_photo, read_photo_in_turns
from .saved_state import Snapshots

log = logging.getLogger(__name__)

DEFAULT_POINTS = 1000
"""Points of a surface in a reply, if a request does not say how many."""
DEFAULT_LEASE_S = 60.0
"""Seconds for which a frame is pinned, if a request does not say how long."""
MAX_PINNED = 4
"""Pinned frames of all cameras. Each takes memory until its lease ends."""

T = TypeVar("T")
Answer = OperationReply | Resumable[OperationReply]
"""The reply to an operation, or the work that makes it, which takes many turns."""


class Host(Protocol):
    """A node, as far as operations use it."""

    @property
    def perception(self) -> Perception: ...

    @property
    def snapshots(self) -> Snapshots: ...

    @property
    def episodes(self) -> Episodes: ...

    def status(self) -> replies.StatusReply:
        """Return the reply to `status`."""

    def describe(self) -> replies.DescriptionReply:
        """Return the reply to `describe`."""


def handle_request(host: Host, request: Request) -> Reply | Resumable[Reply]:
    """Carry out a request and return its reply, or the work that makes it. Every error becomes an error reply."""
    try:
        answer = _answer(host, request.operation)
        if isinstance(answer, Generator):
            return _reply_later(request, answer)
        return Reply(request.id, answer.to_result())
    except Exception as error:
        return _fail(request, error)


def _reply_later(request: Request, work: Resumable[OperationReply]) -> Resumable[Reply]:
    try:
        answer = yield from work
        return Reply(request.id, answer.to_result())
    except Exception as error:
        return _fail(request, error)


def _fail(request: Request, error: Exception) -> Reply:
    # an argument that cannot be read is the client's fault, whichever layer notices it
    if isinstance(error, WireError):
        error = RequestError(str(error))
    if isinstance(error, Sam3NodeError):
        return Reply.failed(request.id, error)
    lost = find_device_error(error)
    if lost is not None:
        return Reply.failed(request.id, lost)
    # anything else is a fault of the node: the log gets the traceback, and the client a code of its own
    log.error("control: %s failed", request.op, exc_info=error)
    message = f"{request.op} failed in the node: {type(error).__name__}: {error}; see its log"
    return Reply(request.id, error=Failure(INTERNAL_ERROR, message))


def describe_change(request: Request, reply: Reply) -> dict[str, object] | None:
    """Return the arguments of a request for its event, so that it can be repeated in another session.

    The camera that the request was applied to and the stride of an object that catches up are added, and the epoch is
    removed. None if the request has surely changed nothing that the node does afterwards.
    """
    # the event of an episode says all about it, so that a recorder needs no earlier one
    if request.op in ops.EPISODE_MARKS and isinstance(reply.result, dict):
        return dict(reply.result)
    # after an error of its own, a request may have changed something
    was_refused = reply.error is not None and reply.error.code != INTERNAL_ERROR
    if request.op not in ops.CHANGES or was_refused:
        return None
    # another session gives other epochs, so an old one would refuse the repeated request
    args = {name: value for name, value in request.args.items() if name not in ("epoch", "like_epoch")}
    # what the node chose here depends on its load and cameras, so a replay needs it in the event
    if isinstance(reply.result, dict):
        args |= {name: reply.result[name] for name in ("camera", "stride") if name in reply.result}
    return args


def carry_out(perception: Perception, operation: Operation[ReplyT]) -> ReplyT:
    """Run a change or a query of perception to its end, and return its reply. Raises RequestError or a subclass."""
    assert isinstance(operation, ops.Change | ops.Query)
    answer = _use_perception(perception, operation)
    if isinstance(answer, Generator):
        answer = run_to_end(answer)
    assert isinstance(answer, operation.Reply)
    return cast(ReplyT, answer)


def _answer(host: Host, operation: ops.AnyOperation) -> Answer:
    if isinstance(operation, ops.ReadStatus):
        return host.status()
    if isinstance(operation, ops.DescribeNode):
        return host.describe()
    # snapshots have checks of their own, and some come from the successor during a hand-over
    if isinstance(operation, ops.SnapshotRequest):
        return _use_snapshots(host.snapshots, operation)
    if isinstance(operation, ops.EpisodeRequest):
        return _mark_episode(host.episodes, operation)
    # a successor would not know the change, but a node whose successor is lost may be resumed
    if isinstance(operation, ops.Change) and not isinstance(operation, ops.Resume):
        host.snapshots.hand_over_state.check_idle()
    if isinstance(operation, ops.AddExemplar) and operation.photo is not None:
        return _add_exemplar_of_photo(host, operation, operation.photo)
    answer = _use_perception(host.perception, operation)
    if isinstance(operation, ops.Resume):
        host.snapshots.take_back()
    return answer


def _use_perception(perception: Perception, operation: ops.Change | ops.Query) -> Answer:
    match operation:
        case ops.AddObject():
            return _add_object(perception, operation)
        case ops.AddLike():
            return _add_like(perception, operation)
        case ops.RefineObject():
            return _refine_object(perception, operation)
        case ops.PinFrame():
            return _pin_frame(perception, operation)
        case ops.RemoveObject():
            return _remove_object(perception, operation)
        case ops.RenameObject():
            return _rename_object(perception, operation)
        case ops.SetPrompts():
            return _set_prompts(perception, operation)
        case ops.AddExemplar():
            return _add_exemplar(perception, operation)
        case ops.Reset():
            return _reset(perception, operation)
        case ops.Pause():
            return _set_paused(perception, True)
        case ops.Resume():
            return _set_paused(perception, False)
        case ops.ListObjects():
            return _list_objects(perception, operation)
        case ops.SegmentFrame():
            return _segment(perception, operation)
        case ops.SegmentEverything():
            return _segment_everything(perception, operation)
        case ops.SegmentPhoto():
            return _segment_photo(perception, operation)
        case ops.ReadPoints():
            return _points(perception, operation)
        case ops.FindObjects():
            return _where(perception, operation)
        case ops.NextPick():
            return _next_pick(perception, operation)
        case ops.ListNames():
            return _list_names(perception, operation)
        case ops.ReadScene():
            return _planning_scene(perception, operation)
        case ops.ReadPicture():
            return _picture(perception, operation)
        case _:
            assert_never(operation)


def _mark_episode(episodes: Episodes, operation: ops.EpisodeRequest) -> OperationReply:
    match operation:
        case ops.BeginEpisode():
            return episodes.begin(operation.task)
        case ops.EndEpisode():
            return episodes.end(operation.keep)
        case _:
            assert_never(operation)


def _use_snapshots(snapshots: Snapshots, operation: ops.SnapshotRequest) -> OperationReply:
    match operation:
        case ops.MakeSnapshot():
            return replies.SnapshotReply(snapshot=snapshots.begin(operation.name))
        case ops.ReadSnapshot():
            return snapshots.read(operation.snapshot, operation.offset)
        case ops.RestoreSnapshot():
            return snapshots.restore_named(operation.name).describe()
        case ops.HandOver():
            return _hand_over(snapshots, operation)
        case ops.ConfirmHandOver():
            state = snapshots.confirm_hand_over(operation.token, operation.accepted)
            return replies.HandOverReply(state=state, node=snapshots.node)
        case _:
            assert_never(operation)


def _add_object(perception: Perception, operation: ops.AddObject) -> replies.PromptedObject:
    label = clean_label(operation.label or "")
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch)
    seq = operation.seq
    # the frame that the object begins on must not be too old; without `seq` that is the next frame
    age_ms: float | None = None
    if seq is not None:
        age_ms = _check_age(perception, pipeline, seq)
    elif perception.session is not None and not perception.paused:
        perception.session.check_next_frame(pipeline.camera)
    prompt = read_prompt(operation)
    added = pipeline.add(
        prompt, label, seq, operation.priority or "normal", operation.stride, operation.choice
    )
    return _describe_object(perception, pipeline, added.id, age_ms, added.result)


def _add_like(perception: Perception, operation: ops.AddLike) -> replies.PromptedObject:
    """Begin an object where the latest frame of one camera surely shows what another camera has tracked."""
    source = _find_pipeline(perception, operation.like_camera, operation.like_epoch, names_object=True)
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch)
    if source is pipeline:
        raise RequestError(
            f"add_like: expected another camera than {source.camera}, which has the object; there it comes back by "
            "itself"
        )
    gallery = source.memory.require(operation.like).gallery
    label = clean_label(_or_default(operation.label, source.memory.label(operation.like)))
    age_ms = _check_age(perception, pipeline, None)
    added = pipeline.add_like(gallery, label)
    perception.join(source.camera, operation.like, pipeline.camera, added.id)
    return _describe_object(perception, pipeline, added.id, age_ms, added.result)


def _refine_object(perception: Perception, operation: ops.RefineObject) -> replies.PromptedObject:
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object=True)
    age_ms = _check_age(perception, pipeline, operation.seq)
    result = pipeline.refine(operation.id, read_prompt(operation), operation.seq, operation.stride)
    return _describe_object(perception, pipeline, operation.id, age_ms, result)


def _pin_frame(perception: Perception, operation: ops.PinFrame) -> replies.PinnedFrame:
    seq = operation.seq
    lease_s = _or_default(operation.lease_s, DEFAULT_LEASE_S)
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch)
    age_ms = _check_age(perception, pipeline, seq)
    pinned = sum(each.prompting.cache_usage["pinned_frames"] for each in perception.pipelines.values())
    # to extend the lease of a pinned frame takes no further memory
    if lease_s and pinned >= MAX_PINNED and not pipeline.prompting.find(seq).lease_ns:
        raise CapacityError(
            f"expected at most {MAX_PINNED} pinned frames, found as many; let one go (lease_s: 0), or wait"
        )
    pipeline.prompting.pin(seq, lease_s)
    return replies.PinnedFrame(
        camera=pipeline.camera, epoch=pipeline.epoch, seq=seq, age_ms=age_ms, lease_s=lease_s
    )


def _remove_object(perception: Perception, operation: ops.RemoveObject) -> replies.ObjectReply:
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object=True)
    # one that was lost is forgotten
    if not pipeline.memory.forget(operation.id):
        pipeline.remove(operation.id)
    return replies.ObjectReply(id=operation.id, camera=pipeline.camera, epoch=pipeline.epoch)


def _rename_object(perception: Perception, operation: ops.RenameObject) -> replies.RenamedObject:
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object=True)
    label = clean_label(operation.label)
    pipeline.rename(operation.id, label)
    return replies.RenamedObject(id=operation.id, label=label, camera=pipeline.camera, epoch=pipeline.epoch)


def _list_objects(perception: Perception, operation: ops.ListObjects) -> replies.ObjectsReply:
    objects = [
        replies.ListedObject(
            camera=pipeline.camera,
            epoch=pipeline.epoch,
            silent_s=_silent_s(perception, pipeline),
            **asdict(status),
        )
        for pipeline in _find_pipelines(perception, operation.camera)
        for status in pipeline.objects
    ]
    return replies.ObjectsReply(objects=tuple(objects))


def _segment(perception: Perception, operation: ops.SegmentFrame) -> replies.SegmentReply:
    prompt = read_prompt(operation)
    pipeline = _find_pipeline(perception, operation.camera)
    age_ms = _check_age(perception, pipeline, operation.seq)
    result = pipeline.prompting.segment(prompt, operation.seq)
    masks = None
    if operation.multimask:
        found = pipeline.prompting.candidates(prompt, operation.seq)
        masks = tuple(_pack_scored(one, perception) for one in found)
    return replies.SegmentReply(
        camera=pipeline.camera,
        epoch=pipeline.epoch,
        age_ms=age_ms,
        seq=result.seq,
        mask=_pack_mask(result, perception),
        score=result.score,
        masks=masks,
    )


def _segment_everything(
    perception: Perception, operation: ops.SegmentEverything
) -> Resumable[replies.EverythingReply]:
    """Find everything on a frame. One such search is under way at a time, because its candidates take much memory."""
    options = _choose_options(perception, operation)
    # an earlier search goes on first
    while perception.searching:
        yield
    pipeline = _find_pipeline(perception, operation.camera)
    age_ms = _check_age(perception, pipeline, operation.seq)
    perception.searching = True
    try:
        seq, results, note = yield from pipeline.prompting.find_everything(options, operation.seq)
    finally:
        perception.searching = False
    # an empty result is no error, but the client should learn what to change
    if note:
        log.info("camera %s: frame %d: %s", pipeline.camera, seq, note)
    return replies.EverythingReply(
        camera=pipeline.camera,
        epoch=pipeline.epoch,
        age_ms=age_ms,
        seq=seq,
        masks=tuple(_pack_scored(result, perception) for result in results),
        note=note or None,
    )


def _segment_photo(perception: Perception, operation: ops.SegmentPhoto) -> Resumable[replies.PhotoReply]:
    """Segment a picture that belongs to no camera. Frames are stepped between its parts."""
    prompts = [make_frame_prompt(prompt) for prompt in operation.list_prompts()]
    search = PhotoSearch(perception.model, perception.detector, prompts, operation.multimask)
    if operation.names:
        search.look_for(operation.names, operation.scores, perception.settings.detector.score)
    search.check()
    _check_file(operation.photo)
    image, _ = yield from read_photo_in_turns(perception, operation.photo)
    found = yield from search.run(image)
    masks = [
        replies.LabelledMask(label=label, mask=_pack_mask(result, perception), score=result.score)
        for label, result in found
    ]
    height, width = image.shape[:2]
    return replies.PhotoReply(width=width, height=height, masks=tuple(masks))


def _choose_options(perception: Perception, operation: ops.SegmentEverything) -> EverythingOptions:
    """Return the options of a search: those of the request, then those of the settings, then the model's own."""
    tracker = perception.settings.tracker
    min_iou = operation.min_iou
    if min_iou is None:
        min_iou = tracker.everything_min_iou or None
    min_stability = operation.min_stability
    if min_stability is None:
        min_stability = tracker.everything_min_stability or None
    return EverythingOptions(
        grid=_or_default(operation.grid, DEFAULT_GRID),
        min_iou=min_iou,
        min_stability=min_stability,
        max_overlap=_or_default(operation.max_overlap, DEFAULT_OVERLAP),
        most=_or_default(operation.most, DEFAULT_MASKS),
    )


def _or_default(value: T | None, default: T) -> T:
    """Return the value of an optional argument."""
    return default if value is None else value


def _points(perception: Perception, operation: ops.ReadPoints) -> replies.PointsReply:
    object_id = operation.id
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object=True)
    # an object that has left has other reasons than one without depth
    _require_object(pipeline, object_id)
    surface = pipeline.points(object_id, operation.count or DEFAULT_POINTS)
    if surface is None:
        reason = pipeline.explain_no_points(object_id)
        raise RequestError(
            f"points: expected object {object_id} with depth on the latest frame, found none: {reason}"
        )
    return replies.PointsReply(
        id=object_id,
        camera=pipeline.camera,
        epoch=pipeline.epoch,
        seq=surface.seq,
        frame=surface.frame,
        points_m=surface.points_m.tobytes(),
    )


def _require_object(pipeline: Pipeline, object_id: int) -> None:
    """Raise UnknownObjectError for an object that is not tracked."""
    ids = [status.id for status in pipeline.objects]
    if object_id not in ids:
        raise UnknownObjectError(f"no object {object_id}; there are {ids or 'none'}")


def _where(perception: Perception, operation: ops.FindObjects) -> replies.PlacesReply:
    """List the objects of an id or a label, those in view first, then those that were seen last."""
    if operation.id is not None:
        pipelines = [_find_pipeline(perception, operation.camera, operation.epoch, names_object=True)]
    else:
        pipelines = _find_pipelines(perception, operation.camera)
    found: list[replies.ObjectPlace] = []
    for pipeline in pipelines:
        silent_s = _silent_s(perception, pipeline)
        for item in pipeline.where(operation.id, operation.label):
            # no frame has shown it since, so it is older by the camera's silence
            age_s = item.age_s
            if age_s is not None:
                age_s = round(age_s + (silent_s or 0.0), 3)
            found.append(replace(item, epoch=pipeline.epoch, silent_s=silent_s, age_s=age_s))
    found.sort(key=lambda item: (not item.in_view, _or_default(item.age_s, math.inf)))
    return replies.PlacesReply(objects=tuple(found))


def _next_pick(perception: Perception, operation: ops.NextPick) -> Resumable[replies.PicksReply]:
    """Rank the objects of the latest frame. One that is too old is no error: its objects are refused."""
    names_object = operation.id is not None
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object)
    pipeline.prompting.find()  # raises UnknownFrameError before the first frame
    if operation.id is not None:
        _require_object(pipeline, operation.id)
    scene = pipeline.last_scene
    session = perception.session
    age_ms = None if session is None else session.prompt_age_ms(scene.age_origin_ns)
    # steps go on meanwhile: the answer is of this frame
    epoch = pipeline.epoch
    problem = pipeline.problem
    objects = [one for one in pipeline.objects if operation.id in (None, one.id)]
    found = yield from rank_picks(scene, objects, PickLimits.of(operation), operation.label, age_ms)
    return replies.PicksReply(
        camera=pipeline.camera,
        epoch=epoch,
        seq=scene.seq,
        age_ms=age_ms,
        frame=found.frame,
        up=found.up,
        picks=tuple(found.picks[: operation.most]),
        refused=tuple(found.refused),
        problem=problem,
    )


def _planning_scene(perception: Perception, operation: ops.ReadScene) -> replies.SceneReply:
    pipeline = _find_pipeline(perception, operation.camera)
    pipeline.prompting.find()  # raises UnknownFrameError before the first frame
    scene = pipeline.last_scene
    session = perception.session
    container = None
    if operation.container:
        container = describe_container(scene, perception.settings.spatial.container)
    boxes = list_boxes(scene)
    held = [one.id for one in scene.instances if one.held]
    known = {*held, *(box.id for box in boxes)}
    return replies.SceneReply(
        camera=pipeline.camera,
        epoch=pipeline.epoch,
        seq=scene.seq,
        age_ms=None if session is None else session.prompt_age_ms(scene.age_origin_ns),
        frame=None if scene.table is None else BASE,
        table=scene.table,
        container=container,
        objects=tuple(boxes),
        unseen=tuple(one.id for one in pipeline.objects if one.id not in known),
        held=tuple(held),
        problem=pipeline.problem,
    )


def _list_names(perception: Perception, operation: ops.ListNames) -> replies.NamesReply:
    known = find_known_names(perception.detector)
    part = (operation.containing or "").casefold()
    fitting = [name for name in known.names if part in name.casefold()]
    return replies.NamesReply(
        detector=perception.detector.name if perception.detector else None,
        is_open=known.is_open,
        count=len(fitting),
        names=tuple(fitting[: operation.most or MAX_ITEMS]),
    )


def _picture(perception: Perception, operation: ops.ReadPicture) -> replies.PictureReply:
    pipeline = _find_pipeline(perception, operation.camera, operation.epoch, names_object=True)
    picture = pipeline.memory.require(operation.id).picture
    if picture is None:
        raise RequestError(
            f"picture: expected a picture of object {operation.id}, found none: it has not been in view by a sure "
            "mask, or tracker.pictures is false"
        )
    return replies.PictureReply(
        id=operation.id, camera=pipeline.camera, epoch=pipeline.epoch, **picture._asdict()
    )


def _set_prompts(perception: Perception, operation: ops.SetPrompts) -> replies.PromptsReply:
    phrases = perception.set_prompts(
        operation.prompts, operation.scores, operation.most, operation.priorities
    )
    return replies.PromptsReply(prompts=tuple(phrases))


def _add_exemplar_of_photo(
    host: Host, operation: ops.AddExemplar, data: bytes
) -> Resumable[replies.ExemplarReply]:
    """Decode the photo while frames are stepped, and then add the exemplar."""
    perception = host.perception
    _check_photo(perception, operation)
    _check_file(data)
    photo = yield from read_photo_in_turns(perception, data)
    # meanwhile the work may have been handed over
    host.snapshots.hand_over_state.check_idle()
    return _add_exemplar(perception, operation, photo)


def _add_exemplar(
    perception: Perception, operation: ops.AddExemplar, photo: Photo | None = None
) -> replies.ExemplarReply:
    """Add boxes on a frame of a camera, or on a photo, which may be decoded already."""
    reply = replies.ExemplarReply(prompts=())
    if operation.photo is None:
        require_exemplars(perception.detector)
        pipeline = _find_pipeline(perception, operation.camera, operation.epoch)
        cached = pipeline.prompting.find(operation.seq)
        age_ms = _check_age(perception, pipeline, operation.seq)
        reply = replace(reply, camera=pipeline.camera, epoch=pipeline.epoch, seq=cached.seq, age_ms=age_ms)
        assert cached.image is not None  # as the detector takes exemplars
        image = cached.image.numpy()
        view = f"{pipeline.camera} {cached.seq} {cached.capture_ns}"
    else:
        _check_photo(perception, operation)
        # a replay has no masks to be late with, and repeats what nodes of all versions have accepted
        if photo is None:
            photo = read_photo(operation.photo, perception.settings.tracker.max_frame_pixels)
        image, view = photo
    # the detector takes corners within the image, and a mark of each box: 1 for what is meant
    boxes = [make_frame_prompt(prompt) for prompt in operation.list_prompts()]
    corners = np.array([box.within(image.shape[:2])[1] for box in boxes]).tolist()
    marks: Sequence[int] = operation.labels if operation.labels is not None else [1] * len(corners)
    phrases = perception.add_exemplar(
        operation.name, image, place=view, boxes=corners, labels=marks, text=operation.text or ""
    )
    return replace(reply, prompts=tuple(phrases))


def _check_photo(perception: Perception, operation: ops.AddExemplar) -> None:
    """Raise RequestError for a detector that takes no exemplars, and for a request with a frame and a photo."""
    require_exemplars(perception.detector)
    if (operation.camera, operation.seq, operation.epoch) != (None, None, None):
        raise RequestError("add_exemplar: expected boxes on a photo, or on a frame (camera, seq), found both")


def _check_file(data: bytes) -> None:
    if len(data) > MAX_PHOTO_FILE:
        raise RequestError(
            f"photo: expected a file of at most {MAX_PHOTO_FILE} bytes, found {len(data)}; send a JPEG, or scale the "
            "photo and its boxes down"
        )


def _reset(perception: Perception, operation: ops.Reset) -> replies.NothingReply:
    for pipeline in _find_pipelines(perception, operation.camera):
        pipeline.reset()
    return replies.NothingReply()


def _set_paused(perception: Perception, paused: bool) -> replies.PausedReply:
    perception.paused = paused
    return replies.PausedReply(paused=paused)


def _hand_over(snapshots: Snapshots, operation: ops.HandOver) -> replies.SnapshotReply:
    """Hand over. A successor that names neither itself nor a token is confirmed at once."""
    token = operation.token
    # nobody will confirm, so there is no token to compare
    if operation.taker is None:
        token = ""
    elif token is None:
        raise RequestError("hand_over: expected 'token' to be a string, found nothing")
    return replies.SnapshotReply(snapshot=snapshots.hand_over(operation.taker, token))


def _find_pipelines(perception: Perception, camera: str | None) -> list[Pipeline]:
    if camera is None:
        return list(perception.pipelines.values())
    return [_find_pipeline(perception, camera)]


def _find_pipeline(
    perception: Perception, camera: str | None = None, epoch: int | None = None, names_object: bool = False
) -> Pipeline:
    """Return the pipeline of the camera, or of the only camera that sends if none is named.

    Raises NodeRestarted if `epoch` is the epoch of other ids. A new object may go to any camera, but an object's id
    belongs to one.
    """
    pipelines = perception.pipelines
    session = perception.session
    # without a name, the only camera that sends is meant, or the only one that has sent
    if camera is None:
        sending = [name for name in pipelines if session is None or session.sends(name)]
        names = sending or list(pipelines)
        if len(names) == 1:
            camera_meant = names[0]
        else:
            raise _camera_error(", ".join(pipelines), camera)
    else:
        camera_meant = camera
    pipeline = pipelines.get(camera_meant)
    if pipeline is None:
        raise _camera_error(", ".join(pipelines), camera)
    # the epoch of a new object may be that of any camera that could have been meant
    if session is not None and epoch is not None:
        is_clear = names_object or camera is not None
        meant = [pipeline] if is_clear else list(pipelines.values())
        session.check_epoch(epoch, [candidate.epoch for candidate in meant])
    return pipeline


def _camera_error(cameras: str, camera: str | None) -> RequestError:
    if not cameras:
        return NoCameraError("no camera has sent a frame yet; start one: sam3-node camera …")
    if camera is not None:
        return NoCameraError(f"no camera {camera!r:.60}: expected a camera that has sent frames: {cameras}")
    return RequestError(f"camera: expected a name unless exactly one camera sends frames, found {cameras}")


def _silent_s(perception: Perception, pipeline: Pipeline) -> float | None:
    if perception.session is None:
        return None
    silent_s = perception.session.silent_s(pipeline.camera)
    return None if silent_s is None else round(silent_s, 3)


def _check_age(perception: Perception, pipeline: Pipeline, seq: int | None) -> float | None:
    """Return the age of the frame that a prompt applies to; UnknownFrameError if it is too old.

    While the node is paused, frames may be old, and so may pinned ones. None if ages say nothing: in a replay, and with
    lossless delivery, where frames wait in queues.
    """
    session = perception.session
    if session is None:
        return None
    cached = pipeline.prompting.find(seq)
    age_ms = session.prompt_age_ms(cached.age_origin_ns)
    if not perception.paused and not cached.lease_ns:
        session.check_prompt_age(pipeline.camera, age_ms)
    return age_ms


def _describe_object(
    perception: Perception,
    pipeline: Pipeline,
    object_id: int,
    age_ms: float | None,
    result: PromptResult | None,
) -> replies.PromptedObject:
    """Return the id and the mask of a prompted object, and its stride if it catches up with another one than 1."""
    stride = pipeline.catch_ups.get_stride(object_id)
    reply = replies.PromptedObject(
        id=object_id,
        camera=pipeline.camera,
        epoch=pipeline.epoch,
        age_ms=age_ms,
        stride=None if stride == 1 else stride,
    )
    if result is None:
        return reply
    return replace(reply, seq=result.seq, mask=_pack_mask(result, perception), score=result.score)


def _pack_scored(result: PromptResult, perception: Perception) -> replies.ScoredMask:
    return replies.ScoredMask(mask=_pack_mask(result, perception), score=result.score)


def _pack_mask(result: PromptResult, perception: Perception) -> MaskMap:
    return pack_mask(result.mask, perception.mask_encoding)

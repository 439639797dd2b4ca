"""The requests of a client, one method each, and the same awaited.

A new operation that users call has its method in ClientRequests, and a line in AwaitedRequests.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from ..errors import NoCameraError, NodeRestarted, RequestError, TransportError
from ..schema import operations as ops
from ..schema import replies
from ..schema.operations import Operation
from ..schema.replies import ReplyT
from ..transport import ControlClient, MaskSubscriber, ask_server
from ..transport.sockets import SocketOwner
from ..types import Priority
from ..wire.frame_prompt import FramePrompt
from ..wire.requests import read_box, write_marks, write_prompt
from . import values
from .mask_reader import Deadline, KnownEpochs

GRASPGEN_ENDPOINT = "tcp://127.0.0.1:5556"
GRASP_POINTS = 2000
"""Points of an object's surface that a GraspGen server gets."""
EVERYTHING_MS = 60_000
"""Time that a node has to segment everything: the default grid takes several seconds on a CPU that steps frames."""
LOADING_MS = 60_000
"""Time that a node which is connected has to load its model, before it answers the first request."""
POINTS_FRAME_MS = 1000
"""Longest time to wait for the masks of the frame that points are of."""

P = ParamSpec("P")
T = TypeVar("T")


class ClientRequests(SocketOwner):
    """Requests to one node. Base of PerceptionClient, which has the connections and knows the epochs."""

    _control: ControlClient
    _epochs: KnownEpochs
    _masks: MaskSubscriber
    _on_restart: Callable[[NodeRestarted], object] | None
    _timeout_ms: int

    def _require_open(self) -> None:
        """Raise TransportError after `close`."""
        raise NotImplementedError

    def _require_newest(self, name: str) -> None:
        """Raise TransportError with lossless delivery."""
        raise NotImplementedError

    def _report(self, restart: NodeRestarted | None) -> None:
        """Raise the error, or call `on_restart` with it. None is no error."""
        raise NotImplementedError

    def ask(self, operation: Operation[ReplyT]) -> ReplyT:
        """Send any request of `sam3_node.schema.operations`, and return its reply as it is in `schema.replies`.

        It does for requests without a method of their own what the methods do: an object's id goes with its epoch.
        """
        if getattr(operation, "id", None) is not None and hasattr(operation, "epoch"):
            return self._call_on_object(operation)
        # a request that could name an object and names none is about all of them, whatever their epoch
        if hasattr(operation, "epoch") and not hasattr(operation, "id"):
            return operation.read_reply(self._ask_with_epoch(operation))
        return self._call(operation)

    def add_object(
        self,
        *,
        points: values.Points | None = None,
        labels: Sequence[int] | None = None,
        box: values.PixelBox | None = None,
        mask: values.MaskLike | None = None,
        label: str | None = None,
        seq: int | None = None,
        camera: str | None = None,
        priority: Priority | None = None,
        choice: int | None = None,
        like: int | None = None,
        like_camera: str | None = None,
    ) -> values.AddedObject:
        """Track a new object. The result holds its id.

        Prompts are `points` [n, 2] with `labels` [n] (1 inside, 0 outside; default all 1), `box` (x0, y0, x1, y1) or
        `mask` [height, width] of bool, of 0 and 1, or of 0 and 255. Of a box that reaches beyond the frame, the node
        uses the part inside, and the result's `note` says so. A box outside raises RequestError. With `seq`, the prompt
        applies at once to that recent frame, and the result holds the mask. Without `seq`, it applies to the next frame
        that arrives. An object of `priority` "low" is tracked on every second frame while the node exceeds its latency
        budget. With `choice`, it begins with that one of the `candidates` that `segment` finds for this prompt, counted
        from 0: the part, or the whole.

        In the place of a prompt, `like` is the id of an object of camera `like_camera`, also of one that was lost: what
        looks like it on the latest frame of `camera` is tracked. `label` is then that of the object, unless another is
        given. Where no place or several places on that frame look like it, it raises RequestError.

        While no camera has sent a frame yet, it waits for the first one, up to the client's `timeout_ms`. Then it
        raises NoCameraError.
        """
        add: ops.AddObject | ops.AddLike
        prompt: FramePrompt | None = None
        if like is not None or like_camera is not None:
            given = (points, labels, box, mask, seq, priority, choice)
            add = _make_like(like, like_camera, camera, label, given)
            known = self._epochs.find(add.like_camera)
            add = replace(add, like_epoch=known.epoch if known else None)
        else:
            values.check_begins(points, labels, box, mask)
            prompt = values.make_prompt(points, labels, box, mask)
            add = ops.AddObject(
                **write_prompt(prompt), label=label, seq=seq, priority=priority, choice=choice, camera=camera
            )
        deadline = Deadline(self._timeout_ms)
        try:
            result = self._ask_once_a_camera_sends(add, deadline)
        except NodeRestarted:
            # with `on_restart`, which was called, a new object has no old id: add it to the new epoch
            if self._on_restart is None:
                raise
            result = self._ask_with_epoch(add, deadline=deadline)
        added = values.read_added(add.read_reply(result))
        self._report(self._epochs.meet(added.camera, added.epoch))
        if prompt is None:
            return added
        # the size of the frame, against which the box was clipped: of the mask, or of the newest masks
        newest = self._masks.newest.get(added.camera)
        size = None
        if added.segmentation is not None:
            size = added.segmentation.mask.size
        elif newest is not None:
            size = (newest.height, newest.width)
        return values.add_note(added, prompt, box, size)

    def _ask_once_a_camera_sends(self, add: ops.AddObject | ops.AddLike, deadline: Deadline) -> object:
        """Send a request for an object; where no camera has sent yet, send it again after the first frame."""
        try:
            return self._ask_with_epoch(add)
        except NoCameraError as error:
            # a program starts camera, node and objects at once
            try:
                self.wait_for_camera(deadline.limit_ms(self._timeout_ms))
            except TransportError:
                raise error from None
        return self._ask_with_epoch(add)

    def wait_for_camera(self, timeout_ms: int | None = 30_000) -> str:
        """Wait until a camera sends and its frame was processed."""
        raise NotImplementedError

    def refine_object(
        self,
        id: int,
        *,
        points: values.Points | None = None,
        labels: Sequence[int] | None = None,
        box: values.PixelBox | None = None,
        mask: values.MaskLike | None = None,
        seq: int | None = None,
        camera: str | None = None,
        epoch: int | None = None,
    ) -> values.Segmentation:
        """Correct a tracked object at once. It takes the same prompts as `add_object`.

        They apply to the recent frame `seq` (default: the latest). Points correct the mask of the object on that
        frame. Raises RequestError for an object that has not been on a frame yet.
        """
        prompt = values.make_prompt(points, labels, box, mask)
        refine = ops.RefineObject(**write_prompt(prompt), id=id, seq=seq, camera=camera, epoch=epoch)
        segmentation = values.read_segmentation(self._call_on_object(refine))
        return values.add_note(segmentation, prompt, box, segmentation.mask.size)

    def remove_object(self, id: int, *, camera: str | None = None, epoch: int | None = None) -> None:
        """Stop tracking an object."""
        self._ask_on_object(ops.RemoveObject(id=id, camera=camera, epoch=epoch))

    def rename_object(
        self, id: int, label: str, *, camera: str | None = None, epoch: int | None = None
    ) -> None:
        """Change the label of an object. Detections no longer change it afterwards."""
        self._ask_on_object(ops.RenameObject(id=id, label=label, camera=camera, epoch=epoch))

    def list_objects(self, *, camera: str | None = None) -> list[replies.TrackedObject]:
        """Return the objects that are tracked now."""
        objects = self._call(ops.ListObjects(camera=camera)).objects
        # the list may be the first to show a new epoch
        for item in objects:
            self._report(self._epochs.meet(item.camera, item.epoch))
        return [values.with_doubt(item, self._masks.newest.get(item.camera)) for item in objects]

    def where(
        self, name_or_id: int | str | None = None, *, camera: str | None = None, epoch: int | None = None
    ) -> list[replies.ObjectPlace]:
        """Return where the objects of a name are, or the one of an id; all for None. Empty: unknown.

        Those in view come first, then those that were seen last. The list also has the objects that were lost: the node
        remembers `tracker.remember` of them, for `tracker.remember_s`. Without `camera`, names are looked for on all
        cameras. `epoch` is that of an id.
        """
        if name_or_id is not None:
            values.check_target(name_or_id)
        if isinstance(name_or_id, int):
            reply = self._call_on_object(ops.FindObjects(id=name_or_id, camera=camera, epoch=epoch))
        else:
            reply = self._call(ops.FindObjects(label=name_or_id, camera=camera, epoch=epoch))
        places = values.check_places(reply.objects)
        for place in places:
            self._report(self._epochs.meet(place.camera, place.epoch))
        return places

    def picture(self, id: int, *, camera: str | None = None, epoch: int | None = None) -> values.LastPicture:
        """Return the last picture of an object, also of one that was lost.

        Raises RequestError if there is none: no sure mask has shown it, or `tracker.pictures` is false.
        """
        return values.read_picture(self._call_on_object(ops.ReadPicture(id=id, camera=camera, epoch=epoch)))

    def segment(
        self,
        *,
        points: values.Points | None = None,
        labels: Sequence[int] | None = None,
        box: values.PixelBox | None = None,
        seq: int | None = None,
        camera: str | None = None,
        multimask: bool = False,
    ) -> values.Segmentation:
        """Segment once, without tracking, on the recent frame `seq` (default: the latest).

        With `multimask`, the result also holds `candidates`: the masks that this prompt may mean, of a part, a larger
        part and the whole, the surest first. SAM 1, 2 and 3 give three, bundled nano one.
        """
        # checked here, so that a wrong prompt costs no time of the node
        values.check_begins(points, labels, box)
        prompt = values.make_prompt(points, labels, box)
        segment = ops.SegmentFrame(**write_prompt(prompt), seq=seq, camera=camera, multimask=bool(multimask))
        segmentation = values.read_segmentation(self._call(segment))
        return values.add_note(segmentation, prompt, box, segmentation.mask.size)

    def pin_frame(self, seq: int, *, lease_s: float = 60.0, camera: str | None = None) -> None:
        """Keep the recent frame `seq` for prompts, for up to 120 seconds by the camera's clock; 0 lets it go.

        At most four frames are kept so. Raises RequestError for a further one, or a frame that is gone.
        """
        self._ask_with_epoch(ops.PinFrame(seq=seq, lease_s=lease_s, camera=camera))

    def segment_everything(
        self,
        *,
        grid: int | None = None,
        min_iou: float | None = None,
        min_stability: float | None = None,
        max_overlap: float | None = None,
        most: int | None = None,
        seq: int | None = None,
        camera: str | None = None,
        timeout_ms: int | None = None,
    ) -> values.Segmentations:
        """Segment everything on the recent frame `seq` (default: the latest) without prompts, the surest first.

        A grid of `grid` x `grid` points (1 to 32, default 16) gives three masks each: a part, a larger part, the whole.
        Masks are kept whose predicted IoU exceeds `min_iou` and whose stability exceeds `min_stability`; without these,
        the node's settings and the model's own limits hold. Of masks whose boxes have an IoU above `max_overlap` (0.7),
        the best is kept; at most `most` (100) in all. A mask may lie within another. The list's `note` says why it is
        empty. The node steps frames meanwhile, and works on this between them: it has `timeout_ms` for its answer, once
        it is connected (default: 60 s, or the client's timeout if that is longer). If the frame is to be prompted on
        afterwards and may no longer be cached then, `pause` before.
        """
        search = ops.SegmentEverything(
            grid=grid,
            min_iou=min_iou,
            min_stability=min_stability,
            max_overlap=max_overlap,
            most=most,
            seq=seq,
            camera=camera,
        )
        self._require_open()
        if timeout_ms is None:
            timeout_ms = max(EVERYTHING_MS, self._timeout_ms)
        reply = self._control.call_long(self._timeout_ms, timeout_ms, search.op, **search.to_args())
        return values.read_segmentations(search.read_reply(reply))

    def segment_photo(
        self,
        photo: bytes,
        objects: Sequence[Mapping[str, Any]] = (),
        *,
        names: Sequence[str] = (),
        scores: Mapping[str, float] | None = None,
        multimask: bool = False,
    ) -> list[values.PhotoMask]:
        """Segment a picture that belongs to no camera, without tracking: the bytes of a JPEG or PNG file.

        `objects` has a map of `points`, `labels` and `box` for each object, in pixels of the picture, as `segment`
        takes them. The masks are in the same order; with `multimask`, all masks that the one object may mean, the
        surest first. Or `names` are looked for, with the minimum `scores` of some: a mask for each thing found, the
        best first.
        """
        prompts = [
            write_marks(values.make_prompt(one.get("points"), one.get("labels"), one.get("box")))
            for one in objects
        ]
        request = ops.SegmentPhoto(
            photo=bytes(photo),
            objects=tuple(prompts) or None,
            names=tuple(values.check_names(names, "names", '["red mug"]')) or None,
            scores=values.check_limits(scores, "scores"),
            multimask=bool(multimask),
        )
        return values.read_photo_masks(self._call(request))

    def points(
        self, id: int, *, count: int = 1000, camera: str | None = None, epoch: int | None = None
    ) -> values.SurfacePoints:
        """Return up to `count` points of an object's visible surface on the latest frame, in metres.

        Raises RequestError for an object without a mask or without depth on that frame.
        """
        request = ops.ReadPoints(id=id, count=count, camera=camera, epoch=epoch)
        return values.read_points(self._call_on_object(request))

    def next_pick(
        self,
        label: str | None = None,
        *,
        id: int | None = None,
        cup_radius_m: float | None = None,
        opening_m: float | None = None,
        reach_m: float | None = None,
        max_age_ms: float | None = None,
        covered: bool = False,
        most: int | None = None,
        camera: str | None = None,
        epoch: int | None = None,
    ) -> replies.PicksReply:
        """Return which object a robot can pick next: those of a label, the one of an id, or all, ranked, with reasons.

        `picks[0]` is the next pick; without picks, `refused` says of each object why. `suction` is for a cup of
        `cup_radius_m` (0.01), `grip` for a parallel gripper that opens to `opening_m` (0.085). Objects that are hidden,
        doubtful, held, covered by others, beyond `reach_m` from the base, or on a frame older than `max_age_ms` (500)
        are refused; with `covered`, those under others follow after the free ones. `most` leaves out all picks but the
        first ones. It needs depth.
        """
        if label is not None:
            values.check_label(label, "label")
        request = ops.NextPick(
            id=id,
            label=label,
            cup_radius_m=cup_radius_m,
            opening_m=opening_m,
            reach_m=reach_m,
            max_age_ms=max_age_ms,
            covered=covered,
            most=most,
            camera=camera,
            epoch=epoch,
        )
        reply = self.ask(request)
        self._report(self._epochs.meet(reply.camera, reply.epoch))
        return reply

    def grasps(
        self,
        id: int,
        *,
        server: str = GRASPGEN_ENDPOINT,
        count: int = 100,
        max_age_ms: float = 500,
        timeout_ms: int = 60_000,
        camera: str | None = None,
        epoch: int | None = None,
    ) -> values.Grasps:
        """Return up to `count` grasps that a GraspGen server plans for an object's visible surface, latest frame.

        The server gets GRASP_POINTS points in the robot's base, over a connection without keys, and has `timeout_ms`.
        Nothing checks for collisions or reach. Raises RequestError for an object without depth, and PolicyError for a
        mask that is hidden, doubtful or older than `max_age_ms` when the server is asked, for points that are not in
        the base, because no hand-eye calibration is set, and for an error or a malformed reply of the server. Raises
        NoAnswerError without a reply, and TransportError with lossless delivery. Source: the protocol of GraspGen's
        ZeroMQ server (NVlabs/GraspGen).
        """
        self._require_open()
        self._require_newest("grasps")
        request = ops.ReadPoints(id=id, count=GRASP_POINTS, camera=camera, epoch=epoch)
        reply = self._call_on_object(request)
        surface = values.read_points(reply)
        name = reply.camera or ""
        # the masks of the frame of these points may still be on their way
        newest = self._masks.newest
        masks = newest.wait(lambda: values.find_frame(newest.get(name), surface.seq), POINTS_FRAME_MS / 1000)
        masks = values.check_graspable(id, surface, masks, max_age_ms)
        # here, because numpy slows the start of a client
        from .observations.policies import pack_graspgen, unpack_graspgen

        answer = ask_server(server, pack_graspgen(surface.points_m, count), timeout_ms)
        return values.Grasps(*unpack_graspgen(answer, count), masks)

    def planning_scene(self, *, container: bool = False, camera: str | None = None) -> replies.SceneReply:
        """Return what a motion planner must not run into, in the robot's base: the table, and the objects as boxes.

        With `container`, also the bin that the objects lie in: the one of the setting spatial.container, else the
        rectangular rim that the latest frame shows. It needs depth, a hand-eye calibration and `spatial.table`.
        """
        reply = self._call(ops.ReadScene(container=container, camera=camera))
        self._report(self._epochs.meet(reply.camera, reply.epoch))
        return reply

    def list_names(self, containing: str | None = None, *, most: int | None = None) -> replies.NamesReply:
        """Return the `names` that the detector knows: all, or those with a text in them, in any case.

        With `is_open`, `set_prompts` takes any other name as well; without, it refuses all others.
        """
        if containing is not None:
            values.check_label(containing, "containing")
        return self._call(ops.ListNames(containing=containing, most=most))

    def set_prompts(
        self,
        prompts: Sequence[str],
        *,
        scores: Mapping[str, float] | None = None,
        most: Mapping[str, int] | int | None = None,
        priorities: Mapping[str, Priority] | None = None,
    ) -> None:
        """Replace the names of the objects to look for. An empty list stops the search.

        Objects whose name stays in the list keep their ids. For each name, `scores` may set the minimum score of a
        detection to start an object, `most` the maximum number of objects, and `priorities` their priority. A number
        as `most` holds for every name.
        """
        names = values.check_names(prompts, "prompts", '["red mug"]')
        # one number for all names is a convenience of the client; the node takes a map
        if isinstance(most, int):
            most = dict.fromkeys(names, most)
        self._ask(
            ops.SetPrompts(
                prompts=tuple(names),
                scores=values.check_limits(scores, "scores"),
                most=values.check_limits(most, "most"),
                priorities=values.check_limits(priorities, "priorities"),
            )
        )

    def add_exemplar(
        self,
        name: str,
        boxes: Sequence[values.PixelBox],
        labels: Sequence[int] | None = None,
        *,
        text: str | None = None,
        photo: bytes | None = None,
        seq: int | None = None,
        camera: str | None = None,
    ) -> None:
        """Look for all that is like `boxes` too, and call it `name`.

        Boxes with label 1 (default: all) show what is meant, boxes with label 0 what is not. They are in pixels of the
        recent frame `seq` (default: the latest), or of `photo`, the bytes of a JPEG or PNG file. `text` says in words
        what is meant; without it, a name that is looked for already is the text. Boxes are added to the earlier ones of
        the name; `set_prompts` without the name ends it. Raises RequestError for a detector that finds names only.
        """
        values.check_label(name, "name")
        self._ask(
            ops.AddExemplar(
                name=name,
                boxes=tuple(read_box(values.make_prompt(box=box)) for box in boxes),
                labels=None if labels is None else tuple(labels),
                text=text,
                photo=photo,
                seq=seq,
                camera=camera,
            )
        )

    def reset(self, *, camera: str | None = None) -> None:
        """Remove all objects, of one camera or of all."""
        self._ask(ops.Reset(camera=camera))

    def pause(self) -> None:
        """Stop processing frames until `resume`."""
        self._ask(ops.Pause())

    def resume(self) -> None:
        """Process frames again."""
        self._ask(ops.Resume())

    def begin_episode(self, task: str | None = None, *, timeout_ms: int | None = None) -> dict[str, Any]:
        """Begin an episode of a dataset, for recorders: `sam3-node record --lerobot` and `sam3-node convert`.

        `task` says in words what is done. None: the names that are looked for. Return `episode`, `task` and `begun_ns`.
        `timeout_ms` is for the answer of a node that is connected, LOADING_MS by default: it may still load its model.
        Raises RequestError if an episode is open.
        """
        begin = ops.BeginEpisode(task=task)
        self._require_open()
        if timeout_ms is None:
            timeout_ms = max(LOADING_MS, self._timeout_ms)
        result = self._control.call_long(self._timeout_ms, timeout_ms, begin.op, **begin.to_args())
        return cast(dict[str, Any], result)

    def end_episode(self, *, keep: bool = True) -> dict[str, Any]:
        """End the episode. Without `keep`, recorders discard it.

        Return what `begin_episode` did, with `ended_ns` and `keep`. Raises RequestError if no episode is open.
        """
        return cast(dict[str, Any], self._ask(ops.EndEpisode(keep=keep)))

    def status(self) -> dict[str, Any]:
        """Return the status of the node."""
        return cast(dict[str, Any], self._ask(ops.ReadStatus()))

    def snapshot(self, name: str) -> values.SnapshotInfo:
        """Let the node keep a snapshot of all that it tracks, in a file `name` beside its `snapshot.path`.

        It takes no longer than a frame from the node's work. Raises SnapshotError if it cannot be written.
        """
        self._require_open()
        return values.make_snapshot(self._control, name)

    def fetch_snapshot(self) -> bytes:
        """Return a snapshot of all that the node tracks, for a file that `sam3-node run --restore-from` takes."""
        self._require_open()
        return values.fetch_snapshot(self._control)

    def restore(self, name: str) -> None:
        """Let the node track again what it tracked at the snapshot `name`. Object ids begin again.

        Raises RequestError if there is no such snapshot, and SnapshotError if it does not fit the node.
        """
        self._ask(ops.RestoreSnapshot(name=name))

    def _call_on_object(self, operation: Operation[ReplyT]) -> ReplyT:
        """Send a request that names an object's id, of its `epoch` or of the one that this client knows."""
        return operation.read_reply(self._ask_on_object(operation))

    def _ask_on_object(self, operation: Operation[Any]) -> object:
        self._require_open()
        named: Any = operation
        return self._ask_with_epoch(replace(named, camera=self._epochs.name_camera(named.camera)))

    def _ask_with_epoch(self, operation: Any, deadline: Deadline | None = None) -> object:
        """Send a request that the node refuses if the ids of the camera have begun again; return its result."""
        self._require_open()
        # an epoch that the caller names is checked by the node alone; else the one seen last goes with the request
        known = self._epochs.find(operation.camera)
        if operation.epoch is not None and (known is None or known.epoch != operation.epoch):
            return self._ask(operation)
        checked = replace(operation, epoch=known.epoch if known else None)
        try:
            return self._ask(checked, deadline)
        except NodeRestarted as error:
            if known is not None:
                error.camera, error.old_epoch = known
                self._epochs.end(known)
            if self._on_restart is not None:
                self._on_restart(error)
            raise

    def _call(self, operation: Operation[ReplyT]) -> ReplyT:
        """Send a request, and return its reply."""
        return operation.read_reply(self._ask(operation))

    def _ask(self, operation: Operation[Any], deadline: Deadline | None = None) -> object:
        """Send a request, and return its result, which nothing has checked."""
        self._require_open()
        timeout_ms = (deadline or Deadline(None)).limit_ms(self._timeout_ms)
        return self._control.call_within(timeout_ms, operation.op, **operation.to_args())


def _make_like(
    like: int | None, like_camera: str | None, camera: str | None, label: str | None, given: Sequence[object]
) -> ops.AddLike:
    """Return the request for an object like another one. Raises RequestError unless it is told by looks alone."""
    if like is None or like_camera is None:
        raise RequestError("like and like_camera: expected the id of an object and the name of its camera")
    if any(value is not None for value in given):
        raise RequestError(
            "like: expected no prompt, seq, priority or choice beside it: it looks on the latest frame"
        )
    return ops.AddLike(like=like, like_camera=like_camera, label=label, camera=camera)


def _awaited(
    method: Callable[Concatenate[ClientRequests, P], T],
) -> Callable[Concatenate[AwaitedRequests, P], Coroutine[Any, Any, T]]:
    """Return a request of the client as a coroutine that runs in a thread."""

    @wraps(method)
    async def call(self: AwaitedRequests, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(partial(method, self._client, *args, **kwargs))

    return call


class AwaitedRequests:
    """The requests of ClientRequests as coroutines. Base of AsyncPerceptionClient, which runs them in threads."""

    _client: ClientRequests

    async def ask(self, operation: Operation[ReplyT]) -> ReplyT:
        """Send any request, see `ClientRequests.ask`."""
        return await self._run(partial(self._client.ask, operation))

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a call of the client in a thread, and return its result."""
        raise NotImplementedError

    add_object = _awaited(ClientRequests.add_object)
    refine_object = _awaited(ClientRequests.refine_object)
    remove_object = _awaited(ClientRequests.remove_object)
    rename_object = _awaited(ClientRequests.rename_object)
    list_objects = _awaited(ClientRequests.list_objects)
    where = _awaited(ClientRequests.where)
    picture = _awaited(ClientRequests.picture)
    pin_frame = _awaited(ClientRequests.pin_frame)
    segment = _awaited(ClientRequests.segment)
    segment_everything = _awaited(ClientRequests.segment_everything)
    segment_photo = _awaited(ClientRequests.segment_photo)
    points = _awaited(ClientRequests.points)
    next_pick = _awaited(ClientRequests.next_pick)
    grasps = _awaited(ClientRequests.grasps)
    planning_scene = _awaited(ClientRequests.planning_scene)
    list_names = _awaited(ClientRequests.list_names)
    set_prompts = _awaited(ClientRequests.set_prompts)
    add_exemplar = _awaited(ClientRequests.add_exemplar)
    reset = _awaited(ClientRequests.reset)
    pause = _awaited(ClientRequests.pause)
    resume = _awaited(ClientRequests.resume)
    begin_episode = _awaited(ClientRequests.begin_episode)
    end_episode = _awaited(ClientRequests.end_episode)
    status = _awaited(ClientRequests.status)
    snapshot = _awaited(ClientRequests.snapshot)
    fetch_snapshot = _awaited(ClientRequests.fetch_snapshot)
    restore = _awaited(ClientRequests.restore)

"""The tools for agents: each asks the node, and answers with plain values that say how old they are.

A tool begins with a request for the node's status, so an answer is never one of a node that has gone. What the node
refuses, such as a request that the role of a key does not permit, is raised with the node's own text.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from ..client import PerceptionClient
from ..client.values import find_frame
from ..errors import (
    ForbiddenError,
    NoAnswerError,
    NodeRestarted,
    RequestError,
    TransportError,
    UnknownObjectError,
    did_you_mean,
)
from ..geometry import mask_iou
from ..resources import Closeable
from ..schema.operations import FOR_AGENTS, QUERIES, Operation
from ..settings import Settings
from ..transport import Security
from ..types import CAMERA_SILENT_S, NANOSECONDS, Instance, MaskFrame
from .answers import (
    MAX_OBJECTS,
    Facts,
    SeenCamera,
    describe_frame,
    describe_last_place,
    describe_object,
    describe_place,
    describe_points,
    describe_reply,
    note_camera_frame,
)
from .arguments import (
    DEFAULT_AGE_MS,
    AddArguments,
    FindArguments,
    KeepingLookArguments,
    LookArguments,
    NameArguments,
    PointsArguments,
    RemoveArguments,
    ToolArguments,
    WaitArguments,
    WhereArguments,
    make_arguments,
)
from .pictures import draw, take_pair

FIRST_MASKS_S = 2.0
"""Longest wait for the first masks of a camera that sends, in seconds."""
ADDED_S = 2.0
"""Longest wait for the first mask of an object that was added, in seconds."""
POINTS_S = 1.0
"""Longest wait for the masks of the frame that points are of, in seconds."""
REST_S = 1.0
"""Time for which the box of an object that lies still has not moved, in seconds."""
REST_SHARE = 0.01
"""Distance by which the corners of its box may move meanwhile, as a share of the frame's diagonal."""
STATUS_S = 1.0
"""Time between two questions for the node's status during a wait, in seconds."""
POLL_MS = 100
"""Longest wait for one message of masks, in milliseconds."""
MAX_NOTES = 16
"""Restarts that wait to be told. Beyond them, the oldest is forgotten."""
SAME_IOU = 0.7
"""IoU from which on two masks are taken to show the same thing."""
MAX_LISTED = 20
"""Labels or names that an error or a note lists."""


class Answer(NamedTuple):
    """What a tool answers: facts, and a JPEG if it shows one."""

    facts: Facts
    jpeg: bytes | None = None

    @property
    def text(self) -> str:
        """The facts as JSON."""
        return json.dumps(self.facts, ensure_ascii=False, allow_nan=False)


class AgentTool(NamedTuple):
    """One tool: its name, its arguments, and what carries it out."""

    name: str
    arguments: type[ToolArguments]
    run: Callable[[Any], Answer]
    edits: bool = False
    """True: it changes what the node tracks."""
    removes: bool = False
    """True: it may take away what was there."""


class RestWatch:
    """Tells which objects lie still: the corners of their boxes have stayed for REST_S, and their masks were sure."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int | None, int], tuple[int, tuple[float, ...]]] = {}

    def observe(self, masks: MaskFrame, instance: Instance) -> bool:
        """Take an object of the newest masks. Return True if it lies still, by the captures of the frames."""
        key = (masks.camera, masks.epoch, instance.id)
        if not (instance.is_sure and instance.area):
            self._since.pop(key, None)
            return False
        corners = tuple(map(float, instance.box))
        begin_ns, first = self._since.setdefault(key, (masks.capture_ns, corners))
        limit = REST_SHARE * math.hypot(masks.width, masks.height)
        if max(abs(now - before) for now, before in zip(corners, first, strict=True)) > limit:
            self._since[key] = (masks.capture_ns, corners)
            return False
        return masks.capture_ns - begin_ns >= REST_S * NANOSECONDS


class AgentTools(Closeable):
    """The tools for one node, of which `allow_edits` adds those that change something. A context manager.

    One call at a time. The node may start later, and may restart. Raises TransportError for a malformed endpoint and
    SettingsError for lossless delivery.
    """

    def __init__(self, settings: Settings, allow_edits: bool = False, timeout_ms: int = 3000) -> None:
        transport = settings.transport
        transport.require_newest("mcp")
        self._transport = transport
        self._restarts: deque[str] = deque(maxlen=MAX_NOTES)
        self._client = PerceptionClient(
            transport.masks,
            transport.control,
            timeout_ms=timeout_ms,
            on_restart=self._note_restart,
            security=Security.from_settings(transport),
        )
        tools = [
            AgentTool("find", FindArguments, self._find),
            AgentTool("look", LookArguments, self._look),
            AgentTool("points", PointsArguments, self._points),
            AgentTool("where", WhereArguments, self._where),
            AgentTool("wait", WaitArguments, self._wait),
        ]
        for operation in FOR_AGENTS:
            edits = operation.op not in QUERIES
            if allow_edits or not edits:
                run = partial(self._ask, operation)
                tools.append(AgentTool(operation.op, make_arguments(operation), run, edits))
        if allow_edits:
            tools[1] = AgentTool("look", KeepingLookArguments, self._look)
            tools.append(AgentTool("add", AddArguments, self._add, edits=True))
            tools.append(AgentTool("name", NameArguments, self._name, edits=True, removes=True))
            tools.append(AgentTool("remove", RemoveArguments, self._remove, edits=True, removes=True))
        self._allow_edits = allow_edits
        self._tools = {tool.name: tool for tool in tools}

    @property
    def tools(self) -> Sequence[AgentTool]:
        """The tools that an agent may call."""
        return tuple(self._tools.values())

    def call(self, name: str, given: Mapping[str, Any]) -> Answer:
        """Carry out a tool. Raises Sam3NodeError with the sentence that an agent reads."""
        tool = self._tools.get(name)
        if tool is None:
            remedy = ""
            if not self._allow_edits:
                remedy = (
                    ". This server only reads; start it with --allow-edits for tools that change something"
                )
            raise RequestError(
                f"unknown tool {name!r:.60}: expected one of {', '.join(self._tools)}"
                f"{did_you_mean(name[:60], self._tools)}{remedy}"
            )
        answer = tool.run(tool.arguments.read(name, given))
        # a restart is told with the first answer after it: what an agent remembers by id is void
        told = [*self._restarts, *answer.facts.get("notes", ()), *note_camera_frame(answer.facts)]
        self._restarts.clear()
        return answer._replace(facts=answer.facts | {"notes": told}) if told else answer

    def close(self) -> None:
        """Close the connection to the node. Idempotent."""
        self._client.close()

    # the tools

    def _find(self, given: FindArguments) -> Answer:
        status = self._ask_status()
        seen = self._see_all(status, given.camera, given.max_age_ms)
        current = [item.current for item in seen if item.current is not None]
        if not current:
            raise TransportError(self._explain_absence(seen))
        # what has the name, and how it stands
        found: list[Facts] = []
        fitting: list[Instance] = []
        labels: set[str] = set()
        for masks in current:
            for instance in masks.instances:
                labels.add(instance.label)
                if _fits(instance, given):
                    fitting.append(instance)
                    found.append(describe_object(masks, instance))
        notes = [item.note for item in seen if item.note]
        if given.name is not None and fitting:
            notes += _note_doubtful_name(given.name, fitting)
        if given.name is not None and not found:
            listed = ", ".join(sorted(labels)[:MAX_LISTED]) or "no objects"
            notes.append(
                f"nothing is tracked as {given.name!r} now; tracked are {listed}{did_you_mean(given.name, labels)}"
            )
        if len(found) > MAX_OBJECTS:
            notes.append(f"{len(found) - MAX_OBJECTS} more objects are left out; ask for a name or a camera")
        facts: Facts = {
            "objects": found[:MAX_OBJECTS],
            "cameras": [item.describe() for item in seen],
            "looking_for": list(status["prompts"]),
            "paused": status["paused"],
            "notes": notes,
        }
        return Answer(facts)

    def _wait(self, given: WaitArguments) -> Answer:
        rest = RestWatch()
        begin_s = time.monotonic()
        asked_s = -math.inf
        labels: set[str] = set()
        while True:
            now_s = time.monotonic()
            # a camera may come meanwhile, and a node that has gone ends the wait
            if now_s - asked_s >= STATUS_S:
                cameras = _list_cameras(self._ask_status(), given.camera)
                asked_s = now_s
            for camera in cameras:
                masks = self._client.newest(camera)
                if masks is None or masks.is_stale(DEFAULT_AGE_MS):
                    continue
                for instance in masks.instances:
                    labels.add(instance.label)
                    if not _is_named(instance, given.name):
                        continue
                    if given.until == "still" and not rest.observe(masks, instance):
                        continue
                    if instance.is_sure:
                        found = describe_object(masks, instance)
                        return Answer({"objects": [found], "waited_s": round(now_s - begin_s, 1)})
            if now_s - begin_s >= given.timeout_s:
                break
            self._client.latest(POLL_MS)
        listed = ", ".join(sorted(labels)[:MAX_LISTED]) or "no objects"
        note = (
            f"no {given.name!r} was surely {given.until} within {given.timeout_s:g} s; seen meanwhile: {listed}"
            f"{did_you_mean(given.name, labels)}"
        )
        return Answer({"objects": [], "waited_s": given.timeout_s, "notes": [note]})

    def _look(self, given: LookArguments) -> Answer:
        status = self._ask_status()
        camera = _choose_camera(status, given.camera)
        self._client.newest(camera)  # notes a restart, if there was one
        pair = take_pair(self._transport, camera)
        drawn = draw(pair, given.max_side, given.masks)
        assert pair.frame is not None
        facts: Facts = {
            "camera": camera,
            "seq": pair.frame.seq,
            "width": drawn.width,
            "height": drawn.height,
            "scale": round(drawn.scale, 4),
        }
        masks = pair.masks
        if masks is None:
            why = "the node is paused" if status["paused"] else self._client.diagnosis()
            facts["notes"] = [f"the picture has no masks: {why}"]
            if pair.frame.clock == "system":
                facts["age_ms"] = round((time.time_ns() - pair.frame.capture_ns) / 1e6)
            return Answer(facts, drawn.jpeg)
        objects = [
            drawn.scale_box(describe_object(masks, instance)) for instance in masks.instances[:MAX_OBJECTS]
        ]
        facts |= describe_frame(masks) | {"objects": objects}
        if isinstance(given, KeepingLookArguments) and given.keep_s:
            facts |= self._keep(masks, given.keep_s)
        return Answer(facts, drawn.jpeg)

    def _keep(self, masks: MaskFrame, keep_s: float) -> Facts:
        """Let the node keep the frame of masks. A refusal is a note: the picture is good without."""
        try:
            self._client.pin_frame(masks.seq, lease_s=keep_s, camera=masks.camera)
        except RequestError as error:
            return {"notes": [f"the node does not keep this frame: {error}"]}
        return {"kept_s": keep_s}

    def _points(self, given: PointsArguments) -> Answer:
        status = self._ask_status()
        camera = _choose_camera(status, given.camera)
        masks, instance = self._get_object(status, camera, given.id, given.epoch)
        self._refuse_untold(given.epoch)
        if not given.count:
            return Answer(describe_place(masks, instance))
        surface = self._client.points(given.id, count=given.count, camera=camera, epoch=given.epoch)
        # the masks of the same frame tell whether they can be trusted; they may still be on their way
        end_s = time.monotonic() + POINTS_S
        same = find_frame(self._client.newest(camera), surface.seq)
        while same is None and time.monotonic() < end_s:
            self._client.latest(POLL_MS)
            same = find_frame(self._client.newest(camera), surface.seq)
        if same is not None:
            masks = same
            instance = _find_instance(masks, given.id)
        return Answer(describe_place(masks, instance) | describe_points(surface))

    def _where(self, given: WhereArguments) -> Answer:
        status = self._ask_status()
        if given.id is not None and given.name is not None:
            raise RequestError("where: expected a name or an id, found both")
        if given.id is None:
            places = self._client.where(given.name, camera=given.camera)
        else:
            camera = _choose_camera(status, given.camera)
            self._client.newest(camera)  # notes a restart, if there was one
            self._refuse_untold(given.epoch)
            places = self._client.where(given.id, camera=camera, epoch=given.epoch)
        notes: list[str] = []
        if not places:
            notes.append(self._explain_unknown(given))
        if len(places) > MAX_OBJECTS:
            notes.append(f"{len(places) - MAX_OBJECTS} more objects are left out; ask for a name or a camera")
        jpeg = None
        if given.picture and places:
            # the places are good without
            try:
                first = places[0]
                picture = self._client.picture(first.id, camera=first.camera, epoch=first.epoch)
                jpeg = picture.jpeg
            except (RequestError, ForbiddenError) as error:
                notes.append(f"there is no picture: {error}")
        objects = [describe_last_place(place) for place in places[:MAX_OBJECTS]]
        return Answer({"objects": objects, "notes": notes}, jpeg)

    def _explain_unknown(self, given: WhereArguments) -> str:
        """Return a note that says what the node knows instead."""
        labels = sorted({place.label for place in self._client.where(camera=given.camera)})
        wanted = f"object {given.id}"
        hint = ""
        if given.name is not None:
            wanted = repr(given.name)
            hint = did_you_mean(given.name, labels)
        known = ", ".join(labels[:MAX_LISTED]) or "no objects"
        return f"it is unknown where {wanted} is; the node knows of {known}{hint}"

    def _add(self, given: AddArguments) -> Answer:
        status = self._ask_status()
        camera = _choose_camera(status, given.camera)
        self._see(status, camera, DEFAULT_AGE_MS)  # the newest masks tell the size of the frame
        points = None
        if given.points is not None:
            points = [(given.scale * x, given.scale * y) for x, y in given.points]
        box = None
        if given.box is not None:
            box = [given.scale * side for side in given.box]
        labels = cast("Sequence[int] | None", given.labels)  # the client refuses fractions
        added = self._client.add_object(
            points=points, labels=labels, box=box, label=given.label, seq=given.seq, camera=camera
        )
        facts: Facts = {"id": added.id, "camera": added.camera, "epoch": added.epoch, "notes": []}
        if added.note:
            facts["notes"].append(added.note)
        # shown as the node sees it, so that an agent notices a mark that missed
        end_s = time.monotonic() + ADDED_S
        while time.monotonic() < end_s:
            masks = self._client.newest(camera)
            instances = masks.instances if masks is not None and masks.epoch == added.epoch else ()
            for instance in instances:
                if instance.id == added.id:
                    assert masks is not None
                    if same := _find_same(masks, instance):
                        facts["notes"].append(
                            f"this is object {same.id}, {same.label!r}, which was tracked already: both have about the "
                            f"same mask; remove object {added.id} unless you mean a part of the other"
                        )
                    return Answer(facts | describe_object(masks, instance))
            self._client.latest(POLL_MS)
        facts["notes"].append("the object has no mask yet: find shows it once a frame was processed")
        return Answer(facts)

    def _name(self, given: NameArguments) -> Answer:
        before = list(self._ask_status()["prompts"])
        most = None
        if given.names:
            most = given.most
        self._client.set_prompts(given.names, most=most)
        return Answer({"looking_for": list(self._ask_status()["prompts"]), "before": before})

    def _remove(self, given: RemoveArguments) -> Answer:
        status = self._ask_status()
        camera = _choose_camera(status, given.camera)
        self._see(status, camera, DEFAULT_AGE_MS)
        self._refuse_untold(given.epoch)
        self._client.remove_object(given.id, camera=camera, epoch=given.epoch)
        return Answer({"removed": given.id, "camera": camera})

    def _ask(self, operation: type[Operation[Any]], given: ToolArguments) -> Answer:
        """Carry out a tool that requests an operation and does nothing else."""
        args = {name: getattr(given, name) for name in operation.__struct_fields__}
        # a request that could name an object and names none is about all of them
        if "epoch" in args and args.get("id", 0) is not None:
            self._refuse_untold(args["epoch"])
        return Answer(describe_reply(self._client.ask(operation(**args))))

    # what they share

    def _note_restart(self, restart: NodeRestarted) -> None:
        self._restarts.append(
            f"object ids of camera {restart.camera} have begun again: forget the ids from before, and call find"
        )

    def _refuse_untold(self, epoch: int | None) -> None:
        """Raise NodeRestarted for an id without its epoch if ids have begun again since the last answer.

        The agent does not know of it yet, so it means an object of before.
        """
        if epoch is None and self._restarts:
            notes = "; ".join(self._restarts)
            self._restarts.clear()
            raise NodeRestarted(notes)

    def _ask_status(self) -> Mapping[str, Any]:
        """Return the node's status. Raises NoAnswerError that says what to do while no node answers."""
        try:
            return self._client.status()
        except NoAnswerError as error:
            raise NoAnswerError(
                f"the node does not answer, so nothing is known of the present: {error}. What was found before is old; "
                "start the node (sam3-node run), or wait until it is back, and call again"
            ) from error

    def _see_all(self, status: Mapping[str, Any], camera: str | None, max_age_ms: float) -> list[SeenCamera]:
        """Return the cameras of the node, or one of them, with their newest masks."""
        return [self._see(status, name, max_age_ms) for name in _list_cameras(status, camera)]

    def _see(self, status: Mapping[str, Any], camera: str, max_age_ms: float) -> SeenCamera:
        """Return a camera with its newest masks; of one that sends, wait for the first."""
        counts = status["cameras"][camera]
        silent_s = counts["silent_s"]
        sends = bool(counts["stepped"]) and silent_s is not None and silent_s < CAMERA_SILENT_S
        end_s = time.monotonic() + FIRST_MASKS_S
        masks = self._client.newest(camera)
        while masks is None and sends and not status["paused"] and time.monotonic() < end_s:
            self._client.latest(POLL_MS)
            masks = self._client.newest(camera)
        return SeenCamera(camera, masks, silent_s, max_age_ms)

    def _explain_absence(self, seen: Sequence[SeenCamera]) -> str:
        """Return one line that says why no camera has current masks, and what to do."""
        notes = "; ".join(item.note for item in seen) or "the node serves no camera"
        return f"there are no current masks: {notes}. {self._client.diagnosis()}"

    def _get_object(
        self, status: Mapping[str, Any], camera: str, id: int, epoch: int | None
    ) -> tuple[MaskFrame, Instance]:
        """Return an object in the current masks of a camera. Raises an error that says why there is none."""
        seen = self._see(status, camera, DEFAULT_AGE_MS)
        masks = seen.current
        if masks is None:
            raise TransportError(self._explain_absence([seen]))
        if epoch is not None and masks.epoch != epoch:
            raise NodeRestarted(
                f"the object ids of epoch {epoch} are void, now it is {masks.epoch}: call find for the present ones",
                camera=camera,
                old_epoch=epoch,
                new_epoch=masks.epoch,
            )
        return masks, _find_instance(masks, id)


def _find_same(masks: MaskFrame, added: Instance) -> Instance | None:
    """Return the older object whose mask is about that of an object that was added; None if there is none."""
    others = [each for each in masks.instances if each.id != added.id and each.area and added.area]
    ious = {each.id: mask_iou(each.mask, added.mask) for each in others}
    best = max(others, key=lambda each: ious[each.id], default=None)
    return best if best is not None and ious[best.id] >= SAME_IOU else None


def _find_instance(masks: MaskFrame, id: int) -> Instance:
    for instance in masks.instances:
        if instance.id == id:
            return instance
    known = ", ".join(str(instance.id) for instance in masks.instances[:MAX_LISTED]) or "none"
    raise UnknownObjectError(
        f"id: expected an object of camera {masks.camera} ({known}), found {id}; call find for the present ones"
    )


def _note_doubtful_name(name: str, instances: Sequence[Instance]) -> list[str]:
    """Return a note where no object surely has the name that was asked for."""
    confidences = {each.id: each.name_confidence for each in instances if each.doubtful}
    named = {object_id: value for object_id, value in confidences.items() if value is not None}
    if len(named) < len(instances):
        return []
    nearest = max(named, key=lambda object_id: named[object_id])
    return [
        f"nothing surely is a {name!r}: object {nearest} is the nearest, with a confidence of {named[nearest]:.2f} in "
        "its name; look at the picture before you use it"
    ]


def _fits(instance: Instance, given: FindArguments) -> bool:
    if given.sure_only and not instance.is_sure:
        return False
    return given.name is None or _is_named(instance, given.name)


def _is_named(instance: Instance, name: str) -> bool:
    return instance.label.casefold() == name.strip().casefold()


def _list_cameras(status: Mapping[str, Any], camera: str | None) -> list[str]:
    """Return the names of all cameras, or of the one that is meant."""
    return sorted(status["cameras"]) if camera is None else [_choose_camera(status, camera)]


def _choose_camera(status: Mapping[str, Any], camera: str | None) -> str:
    """Return the camera that is meant: the named one, or the only one."""
    names: list[str] = sorted(status["cameras"])
    if camera is not None and camera in names:
        return camera
    listed = ", ".join(names[:MAX_LISTED]) or "none"
    if camera is not None:
        raise RequestError(
            f"camera: expected one of the node's cameras ({listed}), found {camera!r:.60}{did_you_mean(camera, names)}"
        )
    if not names:
        raise TransportError("the node serves no camera yet; start one: sam3-node camera …")
    if len(names) > 1:
        raise RequestError(f"camera: expected the name of one of several cameras: {listed}")
    return names[0]

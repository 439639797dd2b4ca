"""Plans what marks change in finished results: which objects are tracked again, and on which frames.

An object is tracked again from each frame with new marks of it to before the next frame that people agree on: one that
is checked, or that has further marks of the object, else to the end of its camera or episode. Before that, the tracker
is shown the object on the agreed frames before the mark, by its masks there.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import msgspec

from ..errors import ReplayError
from ..schema.marks import UNNAMED, Mark, MarkPlace, find_states, list_edits
from ..schema.operations import AddObject, SetPrompts
from ..schema.values import MaskMap
from ..types import FrameKey, Instance, Mask, MaskFrame, TrackState
from ..wire.requests import pack_mask
from .edits import Edit, MarkLabelled, RemoveLabelled
from .event_log import Action, Step
from .job import Sections
from .player import change_mask
from .redone import Layer, Stretch, read_layers, read_results
from .schedule import Schedule
from .second_pass import IndexedFrame
from .shards import CameraObject, Shards
from .store import Store

MAX_SHOWN = 8
"""Agreed frames of an object that the tracker is shown: the first one, and the last ones."""


@dataclass(slots=True)
class _Sightings:
    """What the results have of one object that marks are about."""

    first: int | None = None
    """index of the first result with a mask of it"""
    shown: dict[int, tuple[int, MaskMap]] = field(default_factory=dict)
    """seq and mask by index: of the first result with a mask, and of those that marks are on"""


@dataclass(slots=True)
class _Results:
    """What a plan needs to know of the results."""

    indices: dict[tuple[str, int], int] = field(default_factory=dict)
    """index of each frame (camera, seq) that marks are on"""
    keys: dict[int, FrameKey] = field(default_factory=dict)
    """of these frames"""
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    """index after the last result of each camera and episode"""
    episodes: dict[int, int] = field(default_factory=dict)
    """episode of each frame that marks are on, by index"""
    seen: dict[CameraObject, _Sightings] = field(default_factory=lambda: defaultdict(_Sightings))
    labels: dict[CameraObject, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RedoPlan:
    """A redo of the results of some layers: the next layer, and how its masks are made."""

    kept: tuple[Layer, ...]
    """layers that stay: all marks of theirs are still there"""
    layer: Layer | None
    """None: nothing is made again, but layers go whose marks were taken back"""
    edits: Mapping[int, Sequence[Edit]]
    """what happens on frames, by the index of their results"""
    labels: Mapping[CameraObject, str]
    """of the objects that are made again"""
    marked: frozenset[tuple[FrameKey, int]]
    """frames, each with an object that marks show on it"""
    hidden: frozenset[tuple[FrameKey, int]]
    """frames, each with an object that is not in view on it"""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers after the redo."""
        return (*self.kept, self.layer) if self.layer else self.kept

    def count_steps(self) -> int:
        """Return the number of frames to step, of one camera as if it were alone."""
        covered = set(self.edits)
        for stretch in self._tracked():
            covered.update(range(stretch.first, stretch.stop))
        return len(covered)

    def actions(self, schedule: Schedule, frames: Iterable[IndexedFrame]) -> Iterator[Action]:
        """Yield steps on the frames that are needed, in their order. Objects have their ids as labels.

        An object goes after its last stretch, so that its place is free for others.
        """
        stretches = self._tracked()
        if schedule.settings.detector.prompts:
            yield SetPrompts(prompts=())
        last = {(one.camera, one.id): one.stop for one in stretches}
        find_robot = schedule.make_robot_finder()
        for index, frame in frames:
            for (camera, object_id), stop in list(last.items()):
                if stop <= index:
                    del last[camera, object_id]
                    yield RemoveLabelled(camera, str(object_id))
            edits = tuple(self.edits.get(index, ()))
            inside = (one.camera == frame.camera and one.first <= index < one.stop for one in stretches)
            if edits or any(inside):
                received_ns = frame.sent_ns or frame.capture_ns
                yield Step(frame, received_ns, edits=edits, robot=find_robot(frame))
            if not last:
                return

    def restore(self, masks: MaskFrame) -> MaskFrame:
        """Give the objects of a step their ids and labels. What a person has marked is not doubtful."""
        instances = []
        for instance in masks.instances:
            object_id = int(instance.label)
            instance = replace(
                instance, id=object_id, label=self.labels[masks.camera, object_id], world_id=None
            )
            if (masks.key, object_id) in self.marked:
                instance = _confirm(instance)
            if (masks.key, object_id) in self.hidden:
                instance = _hide(instance)
            instances.append(instance)
        return replace(masks, instances=tuple(instances))

    def describe(self) -> str:
        """Say in one line what is made again."""
        if self.layer is None:
            return "redo: marks were taken back, and with them what was made again for them"
        stretches = self.layer.stretches
        objects = {(one.camera, one.id) for one in stretches}
        return (
            f"redo: {len(self.layer.marks)} marks, {len(stretches)} stretches of {len(objects)} objects, "
            f"{self.count_steps()} frames to step"
        )

    def _tracked(self) -> list[Stretch]:
        if self.layer is None:
            return []
        return [stretch for stretch in self.layer.stretches if not stretch.removed]


def _confirm(instance: Instance) -> Instance:
    state: TrackState = "tracked" if instance.area else "occluded"
    return replace(instance, state=state, frames_since_seen=0, confidence=None, doubtful=False)


def _hide(instance: Instance) -> Instance:
    since = max(1, instance.frames_since_seen)
    hidden = change_mask(_confirm(instance), Mask.empty(instance.mask.size), 0.0)
    return replace(hidden, state="occluded", frames_since_seen=since)


def plan_redo(
    store: Store, marks: Sequence[Mark], episode_starts: Sequence[int] = (), settings: Sections | None = None
) -> RedoPlan | None:
    """Plan what these marks change in the results of a store; None if they changed it already.

    `settings` are those other than the job's. They are kept with the new layer.

    A layer stays as long as all of its marks are there. With the first one that was taken back, it goes, and with it
    the later ones, whose other marks are carried out again. Raises ReplayError for a store without finished results,
    and for marks on other frames or objects than it has.
    """
    if not len(Shards(store)):
        raise ReplayError(
            "redo: expected the results of one replay, found none; replay the recording first, without segments"
        )
    edits = list_edits(marks)
    stored = read_layers(store)
    kept = []
    for layer in stored:
        if not set(layer.marks) <= set(edits):
            break
        kept.append(layer)
    done = {mark for layer in kept for mark in layer.marks}
    new = [mark for mark in edits if mark not in done]
    if not new:
        return (
            None
            if len(kept) == len(stored)
            else RedoPlan(tuple(kept), None, {}, {}, frozenset(), frozenset())
        )

    states = find_states(marks)
    results = _look_through(read_results(store, kept), marks, episode_starts)
    checked = {place for place, state in states.items() if state == "checked"}
    return _Planner(results, _name_objects(edits, kept, results), checked, done).plan(
        tuple(kept), settings or {}
    )


def _look_through(
    masks: Iterable[MaskFrame], marks: Sequence[Mark], episode_starts: Sequence[int]
) -> _Results:
    """Read the results once. A seq that comes again after a restart of the camera means the first frame of it."""
    found = _Results()
    waiting = {(mark.camera, mark.seq) for mark in marks}
    wanted = {(mark.camera, mark.id) for mark in marks if mark.is_edit and mark.id is not None}
    for index, frame in enumerate(masks):
        episode = bisect_right(episode_starts, frame.seq)
        found.ends[frame.camera, episode] = index + 1
        place = frame.camera, frame.seq
        is_marked = place in waiting
        if is_marked:
            waiting.remove(place)
            found.indices[place] = index
            found.keys[index] = frame.key
            found.episodes[index] = episode
        for instance in frame.instances:
            key = frame.camera, instance.id
            found.labels[key] = instance.label
            if key in wanted and instance.area:
                seen = found.seen[key]
                if seen.first is None:
                    seen.first = index
                if is_marked or seen.first == index:
                    seen.shown[index] = frame.seq, pack_mask(instance.mask)
    if waiting:
        camera, seq = min(waiting)
        raise ReplayError(
            f"mark on camera {camera}, frame {seq}: expected a frame of the results, found none; are the marks of "
            "another recording?"
        )
    return found


def _name_objects(edits: Sequence[Mark], kept: Sequence[Layer], results: _Results) -> dict[Mark, int]:
    """Return the id of each mark's object. A prompt without one adds an object, whose id no other has."""
    highest: dict[str, int] = defaultdict(int)
    for camera, object_id in results.labels:
        highest[camera] = max(highest[camera], object_id)
    for mark in edits:
        highest[mark.camera] = max(highest[mark.camera], mark.id or 0)
    ids = {}
    done = {mark for layer in kept for mark in layer.marks}
    for mark in edits:
        if mark.id is not None:
            ids[mark] = mark.id
        # one that was added before is known by the id that it got
        elif mark not in done:
            highest[mark.camera] += 1
            ids[mark] = highest[mark.camera]
    return ids


class _Planner:
    """Makes the stretches and the edits of a redo."""

    def __init__(
        self,
        results: _Results,
        ids: Mapping[Mark, int],
        checked: set[MarkPlace],
        done: set[Mark],
    ) -> None:
        self._results = results
        self._done = done
        # marks of each object by the index of their frame, in the order in which they were made
        self._marks: dict[CameraObject, dict[int, list[Mark]]] = defaultdict(lambda: defaultdict(list))
        for mark, object_id in ids.items():
            index = results.indices[mark.camera, mark.seq]
            self._marks[mark.camera, object_id][index].append(mark)
        self._checked: dict[tuple[str, int | None], set[int]] = defaultdict(set)
        for camera, seq, whose in checked:
            self._checked[camera, whose].add(results.indices[camera, seq])
        self._edits: dict[int, list[Edit]] = defaultdict(list)
        self._labels: dict[CameraObject, str] = {}
        self._marked: set[tuple[FrameKey, int]] = set()
        self._hidden: set[tuple[FrameKey, int]] = set()

    def plan(self, kept: tuple[Layer, ...], settings: Sections) -> RedoPlan:
        """Return the plan."""
        stretches: list[Stretch] = []
        new = []
        for key, marks in self._marks.items():
            own = self._cut(key, marks)
            if own:
                stretches += own
                self._show(key, marks, own)
                new += [mark for group in marks.values() for mark in group if mark not in self._done]
        whole = msgspec.json.encode([[layer.name for layer in kept], stretches, new, settings])
        # a name that only the same redo of the same results has, so that a killed one is continued
        name = hashlib.sha256(whole).hexdigest()[:16]
        layer = Layer(name, tuple(new), tuple(stretches), settings)
        return RedoPlan(
            kept, layer, dict(self._edits), self._labels, frozenset(self._marked), frozenset(self._hidden)
        )

    def _cut(self, key: CameraObject, marks: Mapping[int, Sequence[Mark]]) -> list[Stretch]:
        """Return the stretches of an object, one for each frame with new marks."""
        camera, object_id = key
        agreed = {*marks, *self._checked[camera, object_id], *self._checked[camera, None]}
        stretches = []
        for index in sorted(marks):
            if all(mark in self._done for mark in marks[index]):
                continue
            end = self._results.ends[camera, self._results.episodes[index]]
            stop = min([end, *(one for one in agreed if one > index)])
            is_removed = marks[index][-1].removed
            stretches.append(Stretch(camera, object_id, index, stop, is_removed))
        return stretches

    def _show(self, key: CameraObject, marks: Mapping[int, list[Mark]], stretches: Sequence[Stretch]) -> None:
        """Add the edits that show an object on its agreed frames, and then on those with new marks."""
        camera, object_id = key
        label = str(object_id)
        self._labels[key] = self._find_label(key, marks)
        tracked = [stretch for stretch in stretches if not stretch.removed]
        if not tracked:
            return
        agreed = self._list_agreed(key, marks, stretches, tracked[-1].first)
        for index in (*agreed[:1], *agreed[1:][1 - MAX_SHOWN :]):
            seq, mask = self._results.seen[key].shown[index]
            prompt = AddObject(mask=mask, camera=camera, seq=seq)
            self._edits[index].append(MarkLabelled(label, prompt))
        is_known = bool(agreed)
        for stretch in sorted(stretches, key=lambda one: one.first):
            index = stretch.first
            group = marks[index]
            place = self._results.keys[index], object_id
            if group[-1].removed:
                self._edits[index].append(RemoveLabelled(camera, label))
                is_known = False
                continue
            if group[-1].hidden:
                self._hidden.add(place)
            else:
                prompts = takewhile(lambda mark: mark.has_prompt, reversed(group))
                edits = [MarkLabelled(label, _make_prompt(mark)) for mark in prompts]
                self._edits[index] += reversed(edits)
                self._marked.add(place)
                is_known = True
            if not is_known:
                raise ReplayError(
                    f"mark of object {object_id} of camera {camera}, frame {group[-1].seq}: expected an earlier frame "
                    "that shows the hidden object, found none; remove it, and mark it where it comes into view"
                )

    def _list_agreed(
        self, key: CameraObject, marks: Mapping[int, Sequence[Mark]], stretches: Sequence[Stretch], end: int
    ) -> list[int]:
        """Return the indices before `end` on which the results have a mask of the object that people agree on.

        These are the first one, those that are checked, and those with earlier marks. What is made again is left out.
        """
        camera, object_id = key
        seen = self._results.seen[key]
        earlier = {index for index, group in marks.items() if all(mark in self._done for mark in group)}
        agreed = earlier | self._checked[camera, object_id] | self._checked[camera, None]
        if seen.first is not None:
            agreed.add(seen.first)
        return sorted(
            index
            for index in agreed & seen.shown.keys()
            if index < end and not any(one.first <= index < one.stop for one in stretches)
        )

    def _find_label(self, key: CameraObject, marks: Mapping[int, Sequence[Mark]]) -> str:
        """Return the label of an object. Raises ReplayError for marks of another one than the results have."""
        camera, object_id = key
        known = self._results.labels.get(key)
        said = [mark.label for index in sorted(marks) for mark in marks[index] if mark.has_prompt]
        if known is None and not said:
            raise ReplayError(
                f"mark of object {object_id} of camera {camera}: expected an object of the results, found none; are "
                "the marks of other results?"
            )
        others = [label for label in said if label not in (UNNAMED, known)]
        if known is not None and others:
            raise ReplayError(
                f"mark of object {object_id} of camera {camera}: expected the label {known!r} that the results have, "
                f"found {others[0]!r:.60}; are the marks of other results?"
            )
        return known if known is not None else said[0]


def _make_prompt(mark: Mark) -> AddObject:
    return AddObject(points=mark.points, labels=mark.labels, box=mark.box, camera=mark.camera, seq=mark.seq)

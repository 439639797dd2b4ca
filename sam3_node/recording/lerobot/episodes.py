"""Finds the episodes of a recording, by the requests that marked them, and reads the index of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...bags.native.reader import FrameHead, RecordingReader
from ...bags.pairing import TimeSpan
from ...errors import BagError
from ...schema.operations import BeginEpisode, EndEpisode
from ...types import NANOSECONDS, Clock, FrameKey, JointState, MaskFrame, RobotAction
from ...wire import Event
from .rows import CameraFrames, NamedSeries, SampledValues, Times

UNNAMED = "unnamed"
"""Task of an episode that has no text, no names and no objects."""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode of a recording, from the request that began it to the one that ended it.

    A recording without such requests is one episode, whose times are None.
    """

    key: int
    """Unix time in ns at which the node began it, or at which the recording began"""
    name: str = "its only episode"
    """what it is called in lines for people"""
    task: str = ""
    begin_ns: int | None = None
    end_ns: int | None = None


class FoundEpisodes(NamedTuple):
    """The episodes of a recording that are to be kept, and what is said about the others."""

    episodes: list[RecordedEpisode]
    notes: list[str]


def name_episode(args: Mapping[str, Any]) -> str:
    """Return the name of an episode for people, from the arguments of one of its marks.

    Its number alone would name two of them, as a node that was started again counts from 0.
    """
    task = args.get("task")
    return f"episode {args.get('episode')!r:.20}" + (f" ({task!r:.100})" if task else "")


def find_episodes(reader: RecordingReader) -> FoundEpisodes:
    """Return the episodes of a recording, without those that were discarded or have no end."""
    finder = _EpisodeFinder()
    for entry in reader.index():
        if finder.first_ns is None:
            finder.first_ns = entry.logged_ns
        if isinstance(entry.message, Event):
            finder.add(entry.message, entry.logged_ns)
    return finder.finish()


class _EpisodeFinder:
    """Follows the requests of episodes through a recording."""

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self._episodes: list[RecordedEpisode] = []
        self._notes: list[str] = []
        self._has_marks = False
        # the event that began the open episode, and its time in the recording
        self._open: tuple[Mapping[str, Any], int] | None = None

    def add(self, event: Event, logged_ns: int) -> None:
        if event.op == BeginEpisode.op:
            self._has_marks = True
            # a node has one episode open: a second beginning shows that it was started again
            self._drop_open("the node was started again before its end")
            self._open = event.args, logged_ns
        elif event.op == EndEpisode.op:
            self._has_marks = True
            self._end(event.args, logged_ns)

    def finish(self) -> FoundEpisodes:
        self._drop_open("it has no end in the recording")
        if not self._has_marks and self.first_ns is not None:
            return FoundEpisodes([RecordedEpisode(self.first_ns)], [])
        return FoundEpisodes(self._episodes, self._notes)

    def _end(self, args: Mapping[str, Any], logged_ns: int) -> None:
        key = args.get("begun_ns")
        if self._open is not None and self._open[0].get("begun_ns") != key:
            self._drop_open("it has no end in the recording")
        opened = self._open
        self._open = None
        if type(key) is not int or self.first_ns is None:
            self._notes.append("skipped an episode whose end has no time")
            return
        if args.get("keep") is False:
            self._notes.append(f"skipped {name_episode(args)}: it was discarded")
            return
        # without the mark of its beginning, the end names it
        begin_ns = key if opened is None else opened[1]
        if opened is None and key < self.first_ns:
            self._notes.append(
                f"skipped {name_episode(args)}: it began {(self.first_ns - key) / NANOSECONDS:.1f} s before "
                "the recording, which has only its end; name all files of the recording, or start the recorder before "
                "the episode"
            )
            return
        if begin_ns > logged_ns:
            self._notes.append(f"skipped {name_episode(args)}: it begins after its end, by other clocks")
            return
        task = str(args.get("task") or "")
        self._episodes.append(RecordedEpisode(key, name_episode(args), task, begin_ns, logged_ns))

    def _drop_open(self, reason: str) -> None:
        if self._open is not None:
            self._notes.append(f"skipped {name_episode(self._open[0])}: {reason}")
            self._open = None


@dataclass(slots=True)
class EpisodeIndex:
    """The messages of one episode without pixels: frames by camera, masks by frame, and what the robot did."""

    episode: RecordedEpisode
    heads: dict[str, list[FrameHead]] = field(default_factory=dict)
    times_ns: dict[str, list[int]] = field(default_factory=dict)
    """Times of the frames of each camera"""
    masks: dict[FrameKey, MaskFrame] = field(default_factory=dict)
    states: dict[str, NamedSeries] = field(default_factory=dict)
    """Joints of each robot"""
    actions: dict[str, NamedSeries] = field(default_factory=dict)
    """What each robot was told to do"""
    sources: dict[str, str] = field(default_factory=dict)
    """What the actions of each robot come from"""
    by_arrival: set[str] = field(default_factory=set)
    """Cameras and robots whose clock is not that of the system, so that their times are those of arrival"""

    @property
    def task(self) -> str:
        """The task of the episode: its text, else the names that were looked for, else the labels of its objects."""
        if self.episode.task:
            return self.episode.task
        names: dict[str, None] = {}
        for masks in self.masks.values():
            names |= dict.fromkeys(masks.prompts)
        if not names:
            for masks in self.masks.values():
                names |= dict.fromkeys(instance.label for instance in masks.instances if instance.label)
        return ", ".join(names) or UNNAMED

    def list_cameras(self) -> dict[str, CameraFrames]:
        """Return the frames of each camera, in the order of their times, from the first with masks to the last."""
        cameras = {}
        for camera in sorted(self.heads):
            self._sort(camera)
            has_masks = np.array([head.key in self.masks for head in self.heads[camera]])
            # the node begins after the camera, and its last masks may come after the end
            found = np.flatnonzero(has_masks)
            if len(found):
                kept = slice(int(found[0]), int(found[-1]) + 1)
                self.heads[camera] = self.heads[camera][kept]
                self.times_ns[camera] = self.times_ns[camera][kept]
                has_masks = has_masks[kept]
            cameras[camera] = CameraFrames(np.array(self.times_ns[camera], np.int64), has_masks)
        return cameras

    def sample_states(self, times_ns: Times, max_gap_ns: int) -> tuple[list[str], SampledValues] | None:
        """Return the names of all joints, and their positions at these times; None without joints.

        Raises BagError where a joint has no position near a time.
        """
        names: list[str] = []
        parts = []
        for robot, series in self.states.items():
            parts.append(series.interpolate(times_ns, series.names, max_gap_ns))
            names += name_joints(robot, series.names, len(self.states))
        return join_samples(names, parts)

    def sample_actions(
        self, times_ns: Times, period_ns: int, max_gap_ns: int
    ) -> tuple[list[str], SampledValues] | None:
        """Return the names and values of the actions that belong to rows at these times; None without actions.

        A leader's are interpolated, as joints are. A command or a policy's action follows from what was seen, so that
        the last one before the next row counts. Raises BagError where there is none near a time.
        """
        names: list[str] = []
        parts = []
        for robot, series in self.actions.items():
            if self.sources[robot] == "leader":
                parts.append(series.interpolate(times_ns, series.names, max_gap_ns))
            else:
                parts.append(series.hold(times_ns + period_ns, series.names, max_gap_ns + period_ns))
            names += name_joints(robot, series.names, len(self.actions))
        return join_samples(names, parts)

    def _sort(self, camera: str) -> None:
        order = np.argsort(np.array(self.times_ns[camera], np.int64), kind="stable")
        self.heads[camera] = [self.heads[camera][index] for index in order]
        self.times_ns[camera] = [self.times_ns[camera][index] for index in order]


def name_joints(robot: str, names: list[str], robots: int) -> list[str]:
    """Return the names of a robot's joints: those of its URDF, with the robot's name before them if it has peers."""
    if robots == 1:
        return names
    return [f"{robot}.{name}" for name in names]


def join_samples(names: list[str], parts: list[SampledValues]) -> tuple[list[str], SampledValues] | None:
    """Return the values of several robots as one; None without any."""
    if not names:
        return None
    values = np.concatenate([part.values for part in parts], axis=1)
    return names, SampledValues(values, max(part.max_gap_ms for part in parts))


def read_index(reader: RecordingReader, episode: RecordedEpisode, margin_ns: int) -> EpisodeIndex:
    """Read an episode's messages without pixels. Of the robot also those up to `margin_ns` before and after it.

    Raises BagError for an episode without frames.
    """
    index = EpisodeIndex(episode)
    for logged_ns, message in _read_entries(reader, episode, margin_ns):
        is_inside = (episode.begin_ns or 0) <= logged_ns and (
            episode.end_ns is None or logged_ns <= episode.end_ns
        )
        if isinstance(message, FrameHead):
            if is_inside:
                camera = message.key.camera
                time_ns = _find_time(index, camera, message.key.capture_ns, message.clock, logged_ns)
                index.heads.setdefault(camera, []).append(message)
                index.times_ns.setdefault(camera, []).append(time_ns)
        elif isinstance(message, MaskFrame):
            index.masks[message.key] = message
        elif isinstance(message, JointState):
            time_ns = _find_time(
                index, f"joints of {message.robot}", message.stamp_ns, message.clock, logged_ns
            )
            series = index.states.setdefault(message.robot, NamedSeries(f"joints of {message.robot}"))
            series.add(time_ns, message.positions.items())
        elif isinstance(message, RobotAction):
            what = f"actions of {message.robot}"
            time_ns = _find_time(index, what, message.stamp_ns, message.clock, logged_ns)
            index.actions.setdefault(message.robot, NamedSeries(what)).add(time_ns, message.values.items())
            index.sources[message.robot] = message.source
    if not index.heads:
        raise BagError("expected frames of a camera, found none")
    return index


def _read_entries(
    reader: RecordingReader, episode: RecordedEpisode, margin_ns: int
) -> Iterator[tuple[int, object]]:
    span = TimeSpan()
    if episode.begin_ns is not None and episode.end_ns is not None:
        span = TimeSpan(episode.begin_ns - margin_ns, episode.end_ns + margin_ns + 1)
    return ((entry.logged_ns, entry.message) for entry in reader.index(span))


def _find_time(index: EpisodeIndex, what: str, stamp_ns: int, clock: Clock, logged_ns: int) -> int:
    """Return the time of a message in the system's clock: its own, or that of its arrival if it is of another clock."""
    if clock == "system":
        return stamp_ns
    index.by_arrival.add(what)
    return logged_ns

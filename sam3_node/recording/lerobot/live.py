"""Appends the episodes of a running recording to a LeRobot dataset, each when it has ended.

The recorder writes its own files as always, and begins another one where an episode begins or ends. A child process
converts the files of an ended episode: it decodes and encodes pictures, which would delay the recorder. If it fails or
is killed, nothing is lost, because `sam3-node convert` appends what a dataset lacks. Each episode that was begun is
converted, or a line says why it is not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from ...errors import require
from ...resources import Closeable
from ...schema.operations import BeginEpisode, EndEpisode
from ...settings import Settings
from ...wire import Event
from ..series import RecordedSeries
from .episodes import name_episode
from .layouts import EXTRA

NICE = ("nice", "-n", "10")
"""Command that lets recorder and node go first."""
LEAST_S = 300.0
"""Seconds that each conversion may take, so that one that hangs does not hold later episodes for ever."""
LEAST_BYTES_PER_S = 1e5
"""Rate at which a conversion must at least read a recording: a tenth of what a slow machine does."""


class EpisodeRecorder(Closeable):
    """Follows the marks of episodes in a recording, and has ended episodes converted, one after the other.

    Raises MissingExtraError without pyarrow.
    """

    def __init__(self, settings: Settings, folder: Path, report: Callable[[str], None]) -> None:
        require("pyarrow.parquet", EXTRA)
        self._settings = settings
        self._folder = folder
        self._report = report
        self._waiting: deque[Sequence[Path]] = deque()
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._files: Sequence[Path] = ()
        self._until_s = 0.0
        self._has_marks = False
        # the open episode, and the number of the next one
        self._open: Mapping[str, Any] | None = None
        self._next: int | None = None
        # number of the first file of the open episode
        self._first = 0

    def before(self, event: Event, series: RecordedSeries) -> None:
        """Begin another file before an event that begins an episode."""
        if event.op == BeginEpisode.op:
            self._has_marks = True
            self._leave_open("the node has begun another one before its end")
            self._count(event)
            self._open = event.args
            series.split()
            self._first = len(series.files.paths) - 1

    def after(self, event: Event, series: RecordedSeries) -> None:
        """Begin another file after an event that ends an episode, and have the episode converted unless discarded."""
        if event.op != EndEpisode.op:
            return
        self._has_marks = True
        if self._open is not None and self._open.get("episode") != event.args.get("episode"):
            self._leave_open("its end has not arrived")
        self._count(event)
        self._open = None
        files = series.files.paths[self._first :]
        series.split()
        self._first = len(series.files.paths) - 1
        if event.args.get("keep") is not False:
            self._waiting.append(files)

    def end_recording(self, series: RecordedSeries) -> None:
        """Have a finished recording converted as one episode, if none was marked in it, and name one without an end."""
        self._leave_open(
            "the recorder has ended before it; end or discard an episode before you stop the recorder"
        )
        if not self._has_marks and series.files.bytes:
            self._waiting.append(series.files.paths)

    def _leave_open(self, reason: str) -> None:
        """Report that the open episode, if there is one, is not in the dataset."""
        if self._open is not None:
            self._report(f"lerobot: {name_episode(self._open)} is not in the dataset: {reason}")
        self._open = None

    def _count(self, event: Event) -> None:
        """Report the episodes before this mark of which no mark has come."""
        number = event.args.get("episode")
        if type(number) is not int:
            return
        # a node that was started again counts from 0
        if self._next is not None and number > self._next:
            lost = (
                f"episode {self._next}"
                if number == self._next + 1
                else f"episodes {self._next} to {number - 1}"
            )
            self._report(f"lerobot: {lost}: not in the dataset, because no mark of them has arrived")
        self._next = number + 1

    @property
    def is_busy(self) -> bool:
        """True while an episode is converted or waits for it."""
        return self._child is not None or bool(self._waiting)

    def tick(self) -> None:
        """Report a conversion that has ended, and start the next one."""
        if self._child is not None:
            # what hangs must not hold the episodes behind it
            if time.monotonic() > self._until_s:
                self._report(f"lerobot: the conversion of {self._files[0].name} took too long: killed")
                self._child.kill()
                self._child.wait()
            if self._child.poll() is not None:
                self._finish(self._child)
        if self._child is None and self._waiting:
            self._start(self._waiting.popleft())

    def close(self) -> None:
        """End the conversion that runs, and name the files that are not converted. Idempotent."""
        left = [*self._waiting]
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None
            left.insert(0, self._files)
        self._waiting.clear()
        for files in left:
            self._report_failure(files)

    def _start(self, files: Sequence[Path]) -> None:
        self._files = files
        self._until_s = time.monotonic() + LEAST_S + _count_bytes(files) / LEAST_BYTES_PER_S
        self._output = TemporaryFile()  # noqa: SIM115 - it lives as long as the child
        command = [sys.executable, "-m", "sam3_node", "convert", *map(str, files)]
        for name, value in self._settings.lerobot.model_dump(exclude_none=True).items():
            command += [f"--lerobot.{name}", str(value)]
        # by the robot's body, masks tell the gripper from the arm
        robot = self._settings.robot
        calibrations = ",".join(map(str, self._settings.spatial.calibration))
        if robot.urdf is not None and calibrations:
            command += ["--robot.urdf", str(robot.urdf), "--robot.base", robot.base]
            command += ["--spatial.calibration", calibrations]
        if shutil.which(NICE[0]):
            command = [*NICE, *command]
        # an interrupt is for the recorder, which waits for its last episode
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _finish(self, child: subprocess.Popen[bytes]) -> None:
        self._child = None
        assert self._output is not None
        with self._output as output:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        for line in lines:
            self._report(f"lerobot: {line}")
        if child.returncode != 0:
            self._report_failure(self._files)

    def _report_failure(self, files: Sequence[Path]) -> None:
        names = " ".join(map(str, files))
        self._report(f"lerobot: not converted; sam3-node convert {names} --lerobot {self._folder}")


def _count_bytes(files: Sequence[Path]) -> int:
    # a quota may have deleted a file
    return sum(path.stat().st_size for path in files if path.is_file())

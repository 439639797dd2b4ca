"""Reads HDF5 episodes: ALOHA (observations/images/CAMERA) and robomimic (data/demo_N/obs/CAMERA_image), with joints.

ALOHA's record_episodes and robomimic's dataset_states_to_obs write these layouts. Raw images are RGB. Compressed images
are JPEG or PNG; openpi and lerobot read ALOHA's the same way. The files have no times: a frame's stamp is its row
divided by the rate, which the file's attributes or `PATH#fps=50` give.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import BagError, WireError
from ...resources import closed_on_error
from ...types import NANOSECONDS
from ...wire.images import MAX_FRAME_PIXELS
from .. import samples
from ..isolated import IsolatedCalls
from ..messages.ros import first_bytes

SIGNATURE = b"\x89HDF\r\n\x1a\n"
"""First bytes of an HDF5 file."""
RATES = ("fps", "frequency", "control_freq", "hz")
"""Names of the attributes that may hold the rate of the frames, in Hz."""
NUMBERS = ("float32", "float64")
"""Types of the positions of joints that are read."""
MAX_JOINTS = 256
"""Largest number of joints in a row. A dataset with more is not read as joints."""
ROWS = 16
"""Number of rows that one call of h5py reads."""
MAX_RATIO = 1100
"""Largest ratio of a dataset's unpacked size to its stored one. Deflate reaches a little less."""
JOINTS = "/joint_states"
"""Topic of the joints."""
_CAMERA = re.compile(r"(?:(data/[^/]+)/obs|(?:.*/)?observations/images)/([^/]+)")
_JOINTS = re.compile(r"(data/[^/]+)/obs/robot0_joint_pos|(?:.*/)?observations/qpos")


class _Stream(NamedTuple):
    """The images of one camera in one episode, or its joints, which are numbers of the type `kind`.

    `size` is (width, height) of raw images, else None.
    """

    dataset: str
    rows: int
    size: tuple[int, int] | None = None
    kind: str = "uint8"


class _Episode(NamedTuple):
    """One episode of a file: its number, its rows, and its streams by their topics."""

    number: int
    first_row: int
    rows: int
    streams: dict[str, _Stream]


class Hdf5Bag(samples.SampleReader):
    """The episodes of an HDF5 file. `PATH#episode=3&fps=50` chooses an episode, and gives the rate.

    A frame has the number of its row, counted over all episodes of the file. Raises BagError for a damaged file,
    one of another layout, or one without a rate, MissingExtraError without h5py.
    """

    can_seek = True

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._selection = samples.split_selection(path)
        self._calls = IsolatedCalls("h5py", "hdf5")
        # the child process ends if the file cannot be opened
        with closed_on_error(self._calls):
            content = self._calls.call("list_hdf5", self._selection.path)
            episodes = list(_find_episodes(self._selection.path, content["datasets"]))
            self._fps = self._selection.fps or _find_rate(self._selection.path, content["attributes"])
            self._episodes = [episode for episode in episodes if self._selection.has(episode.number)]
            if not self._episodes:
                numbers = ", ".join(str(episode.number) for episode in episodes[:20])
                raise BagError(f"{path}: expected these episodes in the file, found {numbers}")
        self.episode_starts = tuple(episode.first_row for episode in self._episodes)
        names = dict.fromkeys(name for episode in self._episodes for name in episode.streams)
        self.topics = tuple(
            samples.Topic(name, "hdf5", "joints" if name == JOINTS else "colour") for name in names
        )

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True for an HDF5 file, also with a selection of episodes."""
        file = samples.split_selection(path).path
        return file.is_file() and first_bytes(file, len(SIGNATURE)) == SIGNATURE

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[samples.Sample]:
        # the row of a time follows from the rate, so reading can begin there
        misses = 0
        begin = int(begin_ns * self._fps / NANOSECONDS)
        for episode in self._episodes:
            first = max(begin - episode.first_row, 0)
            chosen = {name: stream for name, stream in episode.streams.items() if name in topics}
            payloads = {name: self._payloads(stream, first) for name, stream in chosen.items()}
            if not payloads:
                continue
            # row by row, so that the samples of all streams come in the order of their stamps
            for row in range(first, episode.rows):
                number = episode.first_row + row
                stamp_ns = round(number / self._fps * NANOSECONDS)
                for name, found in payloads.items():
                    payload = next(found, None)
                    if payload is not None:
                        misses = 0
                        yield samples.Sample(name, stamp_ns, stamp_ns, payload, number)
                        continue
                    misses += 1
                    if misses > samples.MAX_MISSES:
                        self.report.add(
                            f"nothing was read from the row {number} on, after many that are damaged"
                        )
                        return

    def close(self) -> None:
        """End the process that reads the file. Idempotent."""
        self._calls.close()

    def _payloads(self, stream: _Stream, first: int) -> Iterator[samples.Colour | samples.Joints | None]:
        """Yield the images or joints of a stream from a row; None for each that cannot be read."""
        while first < stream.rows:
            try:
                rows = self._calls.call(
                    "read_hdf5", self._selection.path, name=stream.dataset, first=first, count=ROWS
                )
            except BagError as error:
                rows = []
                self.report.skip(stream.dataset, error)
            # a call without rows skips one row, so that damage costs no more than that
            for data in rows or [b""]:
                try:
                    yield _decode(stream, data)
                except (BagError, WireError) as error:
                    if rows:
                        self.report.skip(stream.dataset, error)
                    yield None
            first += len(rows) or 1


def _decode(stream: _Stream, data: bytes) -> samples.Colour | samples.Joints:
    if stream.kind != "uint8":
        positions = np.frombuffer(data, stream.kind).tolist()
        if not all(map(math.isfinite, positions)):
            raise BagError(f"expected finite positions of joints, found {positions}")
        return samples.Joints({str(number): at for number, at in enumerate(positions)})
    if stream.size is not None:
        width, height = stream.size
        if len(data) != width * height * 3:
            raise BagError(f"expected {width} x {height} RGB pixels, found {len(data)} bytes")
        return samples.Colour(width, height, "rgb8", data)
    return samples.Colour.from_compressed(data.rstrip(b"\0"))  # rows are padded to the longest image


def _find_episodes(path: Path, datasets: Mapping[str, Mapping[str, Any]]) -> Iterator[_Episode]:
    """Yield the episodes in the order of their numbers. Raises BagError if no dataset holds images."""
    # each group of robomimic is an episode; an ALOHA file is one episode without a group
    groups: defaultdict[str, dict[str, _Stream]] = defaultdict(dict)
    joints: dict[str, dict[str, _Stream]] = {}
    for name, dataset in datasets.items():
        camera = _CAMERA.fullmatch(name)
        stream = _make_stream(name, dataset)
        if camera is not None and stream is not None:
            groups[camera[1] or ""][f"/{camera[2].removesuffix('_image')}/image"] = stream
            continue
        positions = _JOINTS.fullmatch(name)
        if positions is not None and dataset["type"] in NUMBERS:
            rows, *width = dataset["shape"]
            if len(width) == 1 and width[0] <= MAX_JOINTS:
                joints[positions[1] or ""] = {JOINTS: _Stream(name, rows, kind=dataset["type"])}

    if not groups:
        listed = ", ".join(
            f"{name} {dataset['type']} {dataset['shape']}" for name, dataset in datasets.items()
        )
        raise BagError(
            f"{path}: expected images as ALOHA (observations/images/CAMERA) or robomimic "
            f"(data/demo_0/obs/CAMERA_image) have them, found {listed[:600] or 'no dataset'}"
        )

    # rows are numbered over all episodes; an episode is as long as its longest camera
    first_row = 0
    for index, group in enumerate(sorted(groups, key=lambda name: samples.natural_order(Path(name)))):
        rows = max(stream.rows for stream in groups[group].values())
        streams = groups[group] | joints.get(group, {})
        number = index
        digits = re.search(r"(\d{1,9})$", group)
        if digits is not None:
            number = int(digits[1])
        yield _Episode(number, first_row, rows, streams)
        first_row += rows


def _make_stream(name: str, dataset: Mapping[str, Any]) -> _Stream | None:
    """Return the stream of a dataset with images; None for another dataset."""
    shape = dataset["shape"]
    kind = dataset["type"]
    size = math.prod(shape) * dataset["item_bytes"]
    # rows that were never written take no space
    if size > MAX_RATIO * dataset["stored_bytes"]:
        return None
    # raw images, or encoded ones: as lists of bytes, as text, or as padded rows
    if kind == "uint8" and len(shape) == 4 and shape[3] == 3 and 0 < shape[1] * shape[2] <= MAX_FRAME_PIXELS:
        return _Stream(name, shape[0], (shape[2], shape[1]))
    is_list = len(shape) == 1 and (kind == "list of uint8" or kind.startswith("|S"))
    if is_list or (kind == "uint8" and len(shape) == 2):
        return _Stream(name, shape[0])
    return None


def _find_rate(path: Path, attributes: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the rate in the attributes of the file or of a group, or in robomimic's description of its environment."""
    for values in attributes.values():
        candidates = [values.get(name) for name in RATES]
        text = values.get("env_args")
        if isinstance(text, str):
            # others write what they like there
            with suppress(ValueError, RecursionError, KeyError, TypeError):
                candidates.append(json.loads(text)["env_kwargs"]["control_freq"])
        for rate in candidates:
            if isinstance(rate, int | float) and 0 < rate <= samples.MAX_FPS:
                return float(rate)
    raise BagError(
        f"{path}: expected the rate of the frames in an attribute ({', '.join(RATES)}), found none; add it to the "
        f"path, such as {path.name}#fps=50"
    )

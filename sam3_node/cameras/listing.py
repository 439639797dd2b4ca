"""List of the cameras and recordings that can be opened, with their modes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from ..errors import Sam3NodeError
from .modes import Mode

_MAX_RECORDINGS = 200
_SUFFIXES = (".mcap", ".bag", ".db3", ".mp4", ".mov", ".avi", ".mkv", ".webm")


def list_cameras(folder: Path) -> Iterator[str]:
    """Yield a line for each camera of this machine and each recording in `folder`, and below it a line for each mode.

    A kind that cannot be listed gives a line that says why and what to do. Raises nothing.
    """
    for title, lines in (
        ("RealSense", list_realsense()),
        ("V4L2", _list_v4l2()),
        (f"recordings in {folder}", _list_recordings(folder)),
    ):
        yield f"{title}:"
        count = 0
        try:
            for count, line in enumerate(lines, 1):  # noqa: B007 - the number of lines after the loop
                yield f"  {line}"
        except (Sam3NodeError, OSError) as error:
            yield f"  cannot be listed: {error}"
            continue
        if not count:
            yield "  none"


def describe_modes(modes: Iterable[Mode]) -> Iterator[str]:
    """Yield a line for each size and format, with all its rates."""

    def key(mode: Mode) -> tuple[int, int, str]:
        return -mode.width * mode.height, mode.width, mode.form

    for _, group in groupby(sorted(set(modes), key=key), key):
        same = list(group)
        rates = ", ".join(f"{fps:g}" for fps in sorted(mode.fps for mode in same))
        yield f"{same[0].width}x{same[0].height} {same[0].form}: {rates} fps"


def list_realsense() -> Iterator[str]:
    """Yield a line for each RealSense camera, and below it a line for each mode.

    Raises CameraError, or MissingExtraError without the SDK.
    """
    from .realsense_sdk import explain, load_sdk, read_info
    from .realsense_streams import list_streams

    rs = load_sdk()
    try:
        for device in rs.context().query_devices():
            name, usb = read_info(rs, device, "name"), read_info(rs, device, "usb_type_descriptor")
            yield f"realsense:{read_info(rs, device, 'serial_number')}  {name}, USB {usb or 'unknown'}"
            for kind in (rs.stream.color, rs.stream.depth):
                modes = [stream.mode for stream in list_streams(rs, device, kind)]
                yield from (f"  {kind.name} {line}" for line in describe_modes(modes))
    except RuntimeError as error:
        raise explain("realsense", error) from error


def _list_v4l2() -> Iterator[str]:
    from .v4l2_modes import list_v4l2

    for camera in list_v4l2():
        yield f"v4l2:{camera.path}  {camera.name}"
        yield from (f"  {line}" for line in describe_modes(camera.modes))


def _list_recordings(folder: Path) -> Iterator[str]:
    """Yield a line for each recording of a folder, with its cameras and the size of their first frames."""
    paths = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES]
    for path in sorted(paths)[:_MAX_RECORDINGS]:
        try:
            yield f"bag:{path}  {_describe_recording(path)}"
        except (Sam3NodeError, OSError) as error:
            yield f"bag:{path}  cannot be read: {error}"
    if len(paths) > _MAX_RECORDINGS:
        yield f"and {len(paths) - _MAX_RECORDINGS} more"


def _describe_recording(path: Path) -> str:
    from ..bags.bag import open_bag

    with open_bag(path) as bag:
        first = next(iter(bag), None)
        names = ", ".join(bag.cameras)
    if first is None:
        return f"{names}: no frame that is whole"
    depth = " with depth" if first.depth is not None else ""
    return f"{names}: {first.width}x{first.height} {first.encoding}{depth}"

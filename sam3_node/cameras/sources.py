"""Opens a camera source by its uri, and lists the cameras and recordings that can be opened, with their modes."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import CameraError, Sam3NodeError, did_you_mean
from ..settings import CameraSettings
from .camera_source import CameraSource, Mode

SOURCES = (
    "scene:tabletop, scene:shapes, bag:FILE, video:FILE, images:FOLDER, realsense:SERIAL, rtsp://HOST/PATH, "
    "v4l2:NAME or webcam:INDEX; or tcp://HOST:PORT with camera.dialect"
)
"""The kinds of sources, for error messages."""

# schemes that a misspelt one may mean
_SCHEMES = ("scene", "bag", "video", "images", "realsense", "rtsp", "v4l2", "webcam")
# endings of videos, for a path without a scheme
_VIDEO_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg")
# recordings of a folder that are listed, and their endings
_MAX_RECORDINGS = 200
_SUFFIXES = (".mcap", ".bag", ".db3", ".mp4", ".mov", ".avi", ".mkv", ".webm")


def open_camera(
    uri: str, settings: CameraSettings, stop: threading.Event | None = None, insecure: bool = False
) -> CameraSource:
    """Open one of SOURCES with the rate and looping of `settings`.

    Setting `stop` ends the iteration, also while it waits for the next image. With `insecure`, a hub of camera.dialect
    may bind addresses that other machines reach. Raises CameraError for an unknown scheme, and for a device or
    file that cannot be opened or read; for a recording, BagError; for an address, TransportError.
    """
    scheme, separator, address = uri.partition(":")
    stop = stop or threading.Event()
    # a dialect makes any address one of a camera server
    if settings.dialect != "none" or scheme in ("tcp", "ipc"):
        from .server_source import open_server

        return open_server(uri, settings, stop, insecure)
    if not separator and uri != "realsense":
        scheme = ""
    path = Path(address).expanduser()
    rate = (settings.fps, settings.loop, stop)
    # each scheme imports its own source, so that a webcam needs no library of recordings
    match scheme:
        case "scene" if uri != "scene:tabletop":
            from .scene import SceneSource

            return SceneSource(uri, *rate)
        case "scene" | "bag":
            from .playback import TABLETOP, BagSource

            if scheme == "scene":
                path = TABLETOP
            return BagSource(uri, path, *rate, bool(settings.robot))
        case "video" | "images":
            from .playback import open_files

            return open_files(uri, scheme, path, *rate)
        case "realsense":
            from .realsense_device import open_realsense

            return open_realsense(address, settings, stop)
        case "v4l2":
            from .webcam import open_v4l2

            return open_v4l2(address, settings, stop)
        case "webcam":
            from .webcam import open_webcam

            return open_webcam(address, settings, stop)
        case "rtsp" | "rtsps" | "http" | "https" if address.startswith("//"):
            from .webcam import open_stream

            return open_stream(uri, settings, stop)
    raise CameraError(f"expected {SOURCES} as a camera source, found {uri!r}{_suggest_source(uri)}")


def _suggest_source(uri: str) -> str:
    """Return "; did you mean SOURCE?" for a path without a scheme, a bare index or a misspelt scheme, else ""."""
    # a scheme that is none, else a path, an index or a name without a scheme
    _, separator, address = uri.partition(":")
    if separator:
        return did_you_mean(uri, [f"{scheme}:{address}" for scheme in _SCHEMES])
    path = Path(uri).expanduser()
    if path.suffix.lower() in _VIDEO_SUFFIXES:
        return f"; did you mean video:{uri}?"
    if path.exists() and not uri.startswith("/dev/"):
        if _is_recording(path):
            return f"; did you mean bag:{uri}?"
        return ""
    if uri.isdecimal() or uri.startswith("/dev/video"):
        return f"; did you mean webcam:{uri.removeprefix('/dev/video')}?"
    return did_you_mean(f"scene:{uri}", ("scene:tabletop", "scene:shapes"))


def _is_recording(path: Path) -> bool:
    """Return True if the path holds a recording of any format that can be read."""
    from ..bags.bag import open_bag

    try:
        open_bag(path).close()
    except Sam3NodeError:
        return False
    return True


def list_cameras(folder: Path) -> Iterator[str]:
    """Yield a line for each camera of this machine and each recording in `folder`, and below it a line for each mode.

    For a kind that cannot be listed, a line says why and what to do. Raises nothing.
    """
    for title, lines in (
        ("RealSense", list_realsense()),
        ("V4L2", _list_v4l2()),
        (f"recordings in {folder}", _list_recordings(folder)),
    ):
        yield f"{title}:"
        # a kind that cannot be listed, such as for want of an SDK, hides no other
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
    rates: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
    for width, height, fps, form in sorted(set(modes)):
        rates[width, height, form].append(fps)
    for width, height, form in sorted(rates, key=lambda size: (-size[0] * size[1], size[0], size[2])):
        listed = ", ".join(f"{fps:g}" for fps in rates[width, height, form])
        yield f"{width}x{height} {form}: {listed} fps"


def list_realsense() -> Iterator[str]:
    """Yield a line for each RealSense camera, and below it a line for each mode.

    Raises CameraError, or MissingExtraError without the SDK.
    """
    from .realsense_sdk import explain, list_streams, load_sdk, read_info

    # a device may be unplugged while it is listed
    rs = load_sdk()
    try:
        for device in rs.context().query_devices():
            name = read_info(rs, device, "name")
            usb = read_info(rs, device, "usb_type_descriptor")
            yield f"realsense:{read_info(rs, device, 'serial_number')}  {name}, USB {usb or 'unknown'}"
            for kind in (rs.stream.color, rs.stream.depth):
                modes = [stream.mode for stream in list_streams(rs, device, kind)]
                yield from (f"  {kind.name} {line}" for line in describe_modes(modes))
    except RuntimeError as error:
        raise explain("realsense", error) from error


def _list_v4l2() -> Iterator[str]:
    from .webcam import list_v4l2

    for camera in list_v4l2():
        yield f"v4l2:{camera.path}  {camera.name}{f' at {camera.port}' if camera.port else ''}"
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
    text = f"{names}: {first.width}x{first.height} {first.encoding}"
    if first.depth is not None:
        text += " with depth"
    return text

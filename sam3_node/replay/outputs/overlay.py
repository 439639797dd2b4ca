"""The recording as a video with its masks drawn."""

from contextlib import suppress
from functools import partial
from pathlib import Path

from ...errors import WireError
from ...files import child_path
from ...visualization import VideoWriter, overlay
from ...wire import decode_image
from .output import OutputFormat, Progress, Sources
from .pairs import join_frames, select_camera


class Overlay(OutputFormat):
    """overlay-<camera>.mp4 for each camera."""

    file = "`overlay-<camera>.mp4`: H.264, which browsers play; without PyAV (extra `bags`) MPEG-4, and the log says so"
    pixel_bytes = 0.02

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write a video for each camera, in one pass over masks and frames for each.

        Masks whose frame is missing or cannot be decoded are skipped. A camera without any drawn frame has no video.
        """
        # a pass for each camera, so that only one video is open
        count = 0
        for camera in sorted({masks.camera for masks in sources.masks()}):
            with VideoWriter(child_path(folder, f"overlay-{camera}.mp4")) as film:
                masks_of_camera = partial(select_camera, camera, sources.masks)
                for masks, frame in join_frames(masks_of_camera, sources.frames):
                    with suppress(WireError):
                        if frame is not None:
                            film.write(overlay(decode_image(frame), masks), masks.capture_ns)
                    progress(count + film.frames)
            count += film.frames

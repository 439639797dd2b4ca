"""Name one run of a live node, give epochs to its cameras, and limit the age of prompts. A replay has none of these."""

import secrets
import time
from collections.abc import Callable, Collection

from ..errors import NodeRestarted, UnknownFrameError
from ..schema.fields import MAX_EPOCH
from ..types import CAMERA_SILENT_S


class LiveIdentity:
    """One run of a live node; `node` is its name, 16 random hex digits.

    `silent_s` returns the seconds since the last frame of a camera; None if none has come. Prompts on frames that are
    older than `max_prompt_age_s` are refused; 0 is no limit. With lossless delivery (`live` is False) frames wait in
    queues, so that neither silence nor age says anything.
    """

    def __init__(self, silent_s: Callable[[str], float | None], max_prompt_age_s: float, live: bool) -> None:
        self.node = secrets.token_hex(8)
        self.silent_s = silent_s
        self._max_prompt_age_s = max_prompt_age_s
        self._live = live

    @staticmethod
    def make_epoch() -> int:
        """Return an epoch for a camera whose ids begin now."""
        # random, because no run knows the epochs of the runs before
        return 1 + secrets.randbelow(MAX_EPOCH)

    def sends(self, camera: str) -> bool:
        """Return True if a frame of this camera has come within CAMERA_SILENT_S."""
        silent_s = self.silent_s(camera)
        return not self._live or (silent_s is not None and silent_s < CAMERA_SILENT_S)

    @staticmethod
    def check_epoch(epoch: int, current: Collection[int | None]) -> None:
        """Raise NodeRestarted unless the `epoch` of a request is one of the `current` ones that it may mean."""
        if epoch not in current:
            raise NodeRestarted(
                f"the object ids of epoch {epoch} are void, now it is {', '.join(map(str, current))}: the node was "
                "started again, or served the camera anew; forget its ids and add its objects again"
            )

    def prompt_age_ms(self, age_origin_ns: int) -> float | None:
        """Return the age in ms of a frame to prompt on; None with lossless delivery."""
        # a camera's clock may be a little ahead
        return round(max(0, time.time_ns() - age_origin_ns) / 1e6, 3) if self._live else None

    def check_prompt_age(self, camera: str, age_ms: float | None) -> None:
        """Raise UnknownFrameError if a frame to prompt on is older than the limit."""
        if age_ms is not None:
            self._check_limit(f"camera {camera}: the frame to prompt on was taken", age_ms / 1000)

    def check_next_frame(self, camera: str) -> None:
        """Raise UnknownFrameError if a camera has sent no frame for longer than the limit."""
        silent_s = self.silent_s(camera)
        if self._live and silent_s is not None:
            self._check_limit(f"camera {camera}: the latest frame came", silent_s)

    def _check_limit(self, subject: str, age_s: float) -> None:
        if 0 < self._max_prompt_age_s < age_s:
            raise UnknownFrameError(
                f"{subject} {age_s:.1f} s ago, expected at most {self._max_prompt_age_s:g} s before the prompt "
                "(tracker.max_prompt_age_s): check that the camera runs, and prompt on a newer frame"
            )

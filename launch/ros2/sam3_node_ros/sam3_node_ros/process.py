"""Prepares a process of ROS 2 for raw images, before `rclpy.init`."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

FAST_DDS_PROFILE = Path(__file__).with_name("fast_dds.xml")
"""Settings of Fast DDS. A camera's driver needs them as well: the sender's shared memory must hold the image."""
SETTINGS = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE", "FASTDDS_BUILTIN_TRANSPORTS")
"""Environment variables by which a user configures Fast DDS. The first two name a file in Fast DDS 2 and 3."""
OWN_FILES = ("DEFAULT_FASTRTPS_PROFILES.xml", "DEFAULT_FASTDDS_PROFILES.xml")
"""Files in the working directory that Fast DDS reads"""

# parameters of glibc's mallopt
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
LARGEST_KEPT = 32 << 20
"""Bytes of a block that glibc keeps for the next one of its kind; the most that it allows."""
MOST_KEPT = 64 << 20
"""Free bytes that glibc keeps at the end of its memory"""


def prepare_for_images() -> None:
    """Let images arrive, and let their memory be used again."""
    make_room_in_fast_dds()
    keep_memory()


def make_room_in_fast_dds() -> bool:
    """Let Fast DDS use FAST_DDS_PROFILE, unless a user has configured it. Return whether it does.

    Other middlewares ignore it.
    """
    if any(name in os.environ for name in SETTINGS) or any(map(os.path.exists, OWN_FILES)):
        return False
    for name in SETTINGS[:2]:
        os.environ[name] = str(FAST_DDS_PROFILE)
    return True


def keep_memory() -> None:
    """Let glibc keep the memory of images for the next ones: a new page costs more than the pixels that fill it.

    It halves the time from a camera to the bridge. Other C libraries are left as they are.
    """
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, MOST_KEPT)

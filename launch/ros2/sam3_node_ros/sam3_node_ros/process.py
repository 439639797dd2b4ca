"""Prepares a process of ROS 2 for raw images, before `rclpy.init`, and ends it without an error."""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import rclpy
from rclpy.executors import ExternalShutdownException

FAST_DDS_PROFILE = Path(__file__).with_name("fast_dds.xml")
"""Settings of Fast DDS. A camera's driver needs them as well: the sender's shared memory must hold the image."""
SETTINGS = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE", "FASTDDS_BUILTIN_TRANSPORTS")
"""Environment variables by which a user configures Fast DDS. The first two name a file in Fast DDS 2 and 3."""
OWN_FILES = ("DEFAULT_FASTRTPS_PROFILES.xml", "DEFAULT_FASTDDS_PROFILES.xml")
"""Files in the working directory that Fast DDS reads"""

_log = logging.getLogger(__name__)

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


@contextmanager
def end_with_context() -> Iterator[None]:
    """Run a block until Ctrl-C, or until the context of ROS ends. Neither is an error.

    A signal ends the context while other threads work: an answer or a message that is under way then cannot be sent any
    more, and rclpy raises an error of its own for each kind. With a context, an error is raised as it is.
    """
    try:
        yield
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except Exception as error:
        if rclpy.ok():
            raise
        _log.debug("after the end of the context: %r", error)

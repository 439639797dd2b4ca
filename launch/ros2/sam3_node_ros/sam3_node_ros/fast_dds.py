"""Gives Fast DDS, the usual middleware of ROS 2, shared memory in which raw images have room."""

import os
from pathlib import Path

PROFILE = Path(__file__).with_name("fast_dds.xml")
"""The settings. A camera's driver needs them as well, because the sender's memory must hold the image."""
SETTINGS = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE", "FASTDDS_BUILTIN_TRANSPORTS")
"""Environment variables by which a user configures Fast DDS; the first two name a file in Fast DDS 2 and 3."""
OWN_FILES = ("DEFAULT_FASTRTPS_PROFILES.xml", "DEFAULT_FASTDDS_PROFILES.xml")
"""Files in the working directory that Fast DDS reads"""


def make_room_for_images() -> bool:
    """Set the profile for this process, unless a user has configured Fast DDS. Call it before `rclpy.init`.

    Return whether it was set. Other middlewares ignore it.
    """
    if any(name in os.environ for name in SETTINGS) or any(map(os.path.exists, OWN_FILES)):
        return False
    for name in SETTINGS[:2]:
        os.environ[name] = str(PROFILE)
    return True

"""Stand-in for rclpy.qos."""

from __future__ import annotations

import enum


class ReliabilityPolicy(enum.Enum):
    RELIABLE = 1
    BEST_EFFORT = 2


class QoSProfile:
    """Depth and reliability of a connection, reliable by default."""

    def __init__(self, *, depth: int, reliability: ReliabilityPolicy = ReliabilityPolicy.RELIABLE) -> None:
        self.depth, self.reliability = depth, reliability


qos_profile_sensor_data = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)

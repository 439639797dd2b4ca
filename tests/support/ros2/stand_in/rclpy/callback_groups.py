"""Stand-in for rclpy.callback_groups."""

import threading


class MutuallyExclusiveCallbackGroup:
    """Runs one of its callbacks at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

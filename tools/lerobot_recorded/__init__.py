"""A recording of episodes, converted to a LeRobot dataset, opened and trained on by lerobot's own code."""

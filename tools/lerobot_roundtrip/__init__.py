"""A LeRobot dataset from lerobot's own tools, through `sam3-node replay` to masks, and back to lerobot's own loader."""

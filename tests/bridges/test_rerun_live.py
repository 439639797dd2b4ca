"""Tests of `sam3-node bridge rerun` as a process, with a real camera and node."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.visualization import pick_colour
from tests.bridges.conftest import NAME, BridgeRig
from tests.support.console_rig import iou, true_mask, CLIP_FRAMES, is_in_view
from tests.support.node_rig import Process, until
from tests.support.rrd_files import count_rows, read_rrd

pytest.importorskip("rerun", reason="the extra rerun is not installed")
MIN_IOU = 0.5  # the limit of the bundled weights

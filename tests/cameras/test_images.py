"""images:FOLDER - a folder of images as a camera."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cameras.sources import open_camera
from sam3_node.errors import CameraError
from sam3_node.settings import CameraSettings


def test_images_come_in_the_natural_order_of_their_names(tmp_path: Path) -> None:
    for index in (2, 10, 1):
        cv2.imwrite(str(tmp_path / f"{index}.png"), np.full((48, 64, 3), index, np.uint8))
    source = open_camera(f"images:{tmp_path}", CameraSettings(fps=1000))
    assert [int(image.pixels()[0, 0, 0]) for image in source] == [1, 2, 10]
    assert source.is_finite
    assert source.lost == 0


def test_a_folder_without_images_and_a_file_are_camera_errors(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="images:"):
        open_camera(f"images:{tmp_path}", CameraSettings())
    with pytest.raises(CameraError, match="expected a folder of images, found no folder at"):
        open_camera(f"images:{tmp_path / 'absent'}", CameraSettings())

"""Scenes to train on. These tests run as those of the package do: one thread a process."""

from pathlib import Path

import pytest

from tests.conftest import keep_denormals as keep_denormals  # sets the threads, too
from tests.support.rectangles import write_rectangles


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rectangles(tmp_path_factory.mktemp("scenes"))

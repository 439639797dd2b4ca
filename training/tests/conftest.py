"""Scenes to train on. Restores what the training commands set for their whole process.

These tests run as those of the package do: one thread a process.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import conftest  # noqa: F401 sets the threads
from tests.support.rectangles import write_rectangles


@pytest.fixture(autouse=True)
def keep_denormals() -> Iterator[None]:
    """Stop flushing denormals to zero after each test: other tests of this process need IEEE arithmetic."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rectangles(tmp_path_factory.mktemp("scenes"))

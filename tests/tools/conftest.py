"""Restores what the training commands set for their whole process."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def keep_denormals() -> Iterator[None]:
    """Stop flushing denormals to zero after each test: other tests of this process need IEEE arithmetic."""
    yield
    torch.set_flush_denormal(False)

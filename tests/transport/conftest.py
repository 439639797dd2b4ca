"""Fixtures of the tests of sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.key_rig import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)

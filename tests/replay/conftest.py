"""Tiny weights, and one loaded model for all replays."""

from __future__ import annotations

import pytest

from sam3_node.replay.run import PerceptionCache
from sam3_node.settings import Settings
from tests.support.live import tiny_settings


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return tiny_settings(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def load() -> PerceptionCache:
    return PerceptionCache()

"""Tests of the limit of open files."""

from __future__ import annotations

import logging
import os
import resource

import pytest

from sam3_node.processes import logs


def test_the_soft_limit_rises_to_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(logs, "MAX_DESCRIPTORS", 600)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert logs.raise_descriptor_limit() == 600
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (600, before[1])
        assert logs.raise_descriptor_limit() == 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_nearly_full_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(logs, "NEARLY_FULL", 1.0)
        assert not logs.warn_if_descriptors_run_out()
        monkeypatch.setattr(logs, "NEARLY_FULL", 0.0)
        assert logs.warn_if_descriptors_run_out()
    (record,) = caplog.records
    assert f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files are open" in record.message
    assert os.listdir("/proc/self/fd")

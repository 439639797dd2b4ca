"""The trimming of the heap."""

from __future__ import annotations

import ctypes

import pytest

from sam3_node.node import node
from sam3_node.transport.limits import rss_bytes

CHUNK, COUNT = 100_000, 400


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_free_memory_between_chunks_in_use_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmer = node.HeapTrimmer()
    chunks = [ctypes.create_string_buffer(b"x" * (CHUNK - 1)) for _ in range(COUNT)]
    kept = chunks[::20]
    chunks.clear()
    before = rss_bytes()
    trimmer.tick()
    assert before - rss_bytes() < CHUNK * COUNT // 2  # it is not time yet
    monkeypatch.setattr(node.time, "monotonic", lambda: trimmer._next_s)
    trimmer.tick()
    assert before - rss_bytes() > CHUNK * COUNT // 2
    assert len(kept) == COUNT // 20

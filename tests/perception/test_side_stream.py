"""Work beside the main stream: nothing of the kind on a CPU, a stream of its own on a GPU."""

from __future__ import annotations

import pytest
import torch

from sam3_node.perception.track_manager import SideStream


def test_on_a_cpu_work_is_just_done() -> None:
    beside = SideStream(torch.device("cpu"))
    beside.mark()
    with beside.run():
        total = int(torch.ones(8).sum())
    assert total == 8


@pytest.mark.gpu
def test_on_a_gpu_it_waits_for_what_was_marked_and_not_for_what_came_later() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    beside = SideStream(device)
    marked = torch.ones(1 << 20, device=device) * 3
    beside.mark()
    float(marked.sum())  # loads the kernel now: the first use of one may wait for all streams
    torch.cuda._sleep(1 << 30)  # keeps the main stream busy
    later = torch.cuda.Event()
    later.record()
    with beside.run():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        total = float(marked.sum())
    assert total == 3 * (1 << 20)
    assert not later.query(), "the main stream is still busy"

"""Copies to the host: values of the time at which they were made, without waiting for what came later."""

from __future__ import annotations

import pytest
import torch

from sam3_node.tracking.host_copy import HostCopy


def test_a_copy_holds_the_values_at_its_time() -> None:
    """Graphs and engines may write to the same tensor again before the copy is read."""
    values = torch.tensor([0.25, 0.5])
    copied = HostCopy(values)
    values.zero_()
    assert copied.read().tolist() == [0.25, 0.5]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_later_work() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = torch.tensor([0.25, 0.5], device="cuda")
    HostCopy(values).read()  # loads what the first use loads
    copied = HostCopy(values)
    torch.cuda._sleep(1 << 30)
    later = torch.cuda.Event()
    later.record()
    assert copied.read().tolist() == [0.25, 0.5]
    assert not later.query(), "the device is still busy"

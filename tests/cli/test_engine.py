"""Progress of `engine build` on a terminal and in a log."""

from __future__ import annotations

import io
from contextlib import closing

from sam3_node.cli.progress import StepProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_and_then_the_time_of_each_step() -> None:
    now, out = [0.0], Terminal()
    with closing(StepProgress(out, clock=lambda: now[0])) as bars:
        for now[0], fraction in ((0.0, 0.0), (10.0, 0.25), (30.0, 1.0)):
            bars.report("encode", fraction)
        bars.report("read", 0.0)
    assert "encode:   0%|" in out.getvalue()
    assert "encode: done in 30.0 s\n" in out.getvalue()
    assert out.getvalue().endswith("read: ended after 0.0 s\n")


def test_a_log_gets_one_line_for_each_step() -> None:
    out = io.StringIO()
    with closing(StepProgress(out, clock=lambda: 0.0)) as bars:
        for title in ("encode", "read"):
            for fraction in (0.0, 0.5, 1.0):
                bars.report(title, fraction)
    assert out.getvalue().splitlines() == ["encode: done in 0.0 s", "read: done in 0.0 s"]

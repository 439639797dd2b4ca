"""What starts processes for tests and benchmarks: their ports differ, and the end of one is told at once."""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.processes import Process
from tools.bench.processes import BLOCK_PORTS, free_ports

DRAW = "from tools.bench.processes import free_ports; print(*free_ports(20), flush=True); input()"


def test_ports_come_again_only_after_a_whole_block() -> None:
    drawn = [free_ports(1)[0] for _ in range(BLOCK_PORTS // 2)]
    assert len(set(drawn)) == len(drawn)
    assert len(set(free_ports(20))) == 20


def test_processes_that_live_at_the_same_time_draw_different_ports() -> None:
    command = [sys.executable, "-c", DRAW]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(3)
    ]
    drawn = free_ports(20)
    for process in processes:
        drawn += map(int, process.stdout.readline().split())
    for process in processes:
        process.communicate("\n")
    assert len(set(drawn)) == 80


def test_more_ports_than_a_process_has_are_refused() -> None:
    with pytest.raises(SystemExit, match="free TCP ports"):
        free_ports(10 * BLOCK_PORTS)


def test_a_process_that_ended_is_not_waited_for() -> None:
    with Process.spawn(
        [sys.executable, "-c", "print('one')\nprint('two')\nraise SystemExit('no port')"]
    ) as ended:
        assert ended.line_with("two") == "two"
        assert ended.next_line() == "one"
        for wait in (ended.new_line, ended.next_line, lambda: ended.line_with("three")):
            with pytest.raises(AssertionError, match=r"ended.*no port"):
                wait()
        assert ended.take_lines() == []

"""Completion of `sam3-node` by the script that the command writes, in a real bash, zsh and fish where installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from sam3_node.cli.main import main
from sam3_node.cli.shell_completion import SHELLS, write_script
from tests.support.command_line import command_parser
from tests.support.patience import PATIENCE_S

BEGUN = "begun"
"""What stands before the words that a shell offers for one line."""
ASK_BASH = f"""
source "$1"
shift
for line; do
    IFS=' ' read -ra COMP_WORDS <<<"$line"
    [[ $line == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    _shtab_sam3_node
    printf '%s\\n' {BEGUN} "${{COMPREPLY[@]}}"
done
"""
ASK_FISH = f"""
source $argv[1]
for line in $argv[2..-1]
    echo {BEGUN}
    complete -C $line
end
"""
# zsh completes at a terminal alone: each match is written into a file on its way to the screen
ZSH_PROFILE = f"""
fpath=($ZDOTDIR $fpath)
autoload -Uz compinit
compinit -u -d $ZDOTDIR/dump
compadd() {{
    if [[ ${{@[1,(i)(-|--)]}} == *-(O|A|D)\\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a offered
    builtin compadd -A offered "$@"
    print -rl -- $offered >>$ZDOTDIR/offered
    builtin compadd "$@"
}}
begin() {{ print {BEGUN} >>$ZDOTDIR/offered; BUFFER= }}
zle -N begin
leave() {{ exit }}
zle -N leave
bindkey '^I' complete-word '^T' begin '^G' leave
"""

NEXT = {
    "re": {"record", "request", "resume", "reset", "replay"},
    "object ": {"add", "refine", "remove", "rename", "points", "list"},
    "object ren": {"rename"},
    "object add --bo": {"--box"},
    "replay a.mcap --sure": {"--sure-only"},
    "replay a.mcap --strategy ": {"forward", "bidirectional"},
    "run --detector.kind y": {"yolo-world"},
    "run --transport.fr": {"--transport.frames"},
    "run --tracker.recall ": {"true", "false"},
    "completion ": set(SHELLS),
    "replay clip": {"clip.mcap", "clips"},
    "replay a.mcap -o clip": {"clip.mcap", "clips"},
    "run --profile clip": {"clip.mcap", "clips"},
}
"""What follows a line behind `sam3-node`."""


@cache
def script(shell: str) -> str:
    return write_script(shell, command_parser())


def run(folder: Path, *command: str | Path) -> list[str]:
    """Return the lines that a shell prints."""
    environment = {**os.environ, "HOME": str(folder)}
    options = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "env": environment}
    done = subprocess.run(command, cwd=folder, **options)  # type: ignore[call-overload]
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()  # type: ignore[no-any-return]


def ask_bash(folder: Path, lines: list[str]) -> list[str]:
    path = folder / "completion"
    path.write_text(script("bash"))
    return run(folder, "bash", "--norc", "-c", ASK_BASH, "bash", path, *lines)


def ask_fish(folder: Path, lines: list[str]) -> list[str]:
    path = folder / "completion"
    path.write_text(script("fish"))
    printed = run(folder, "fish", "--no-config", "-c", ASK_FISH, path, *lines)
    # the description stands behind a tab
    return [line.partition("\t")[0] for line in printed]


def ask_zsh(folder: Path, lines: list[str]) -> list[str]:
    (folder / "_sam3-node").write_text(script("zsh"))
    (folder / ".zshrc").write_text(ZSH_PROFILE)
    terminal, inner = pty.openpty()
    environment = {**os.environ, "ZDOTDIR": str(folder), "TERM": "dumb"}
    streams = {"stdin": inner, "stdout": inner, "stderr": inner}
    process = subprocess.Popen(  # type: ignore[call-overload]
        ["zsh", "-i"], cwd=folder, env=environment, start_new_session=True, **streams
    )
    end_s = time.monotonic() + PATIENCE_S
    try:
        # typed before the shell reads: no key here is special to a terminal
        os.write(terminal, "".join(f"\x14{line}\t" for line in lines).encode() + b"\x07")
        # the terminal must be read, or the shell waits
        while process.poll() is None and time.monotonic() < end_s:
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(inner)
    return (folder / "offered").read_text().splitlines()


ASK = {"bash": ask_bash, "zsh": ask_zsh, "fish": ask_fish}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_offers_what_may_follow(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} is installed")
    (tmp_path / "clip.mcap").touch()
    (tmp_path / "clips").mkdir()
    offered: list[set[str]] = []
    for word in ASK[shell](tmp_path, [f"sam3-node {line}" for line in NEXT]):
        if word == BEGUN:
            offered.append(set())
        elif word:
            offered[-1].add(word.rstrip("/"))
    assert dict(zip(NEXT, offered, strict=True)) == NEXT


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_starts_no_program_of_this_package(shell: str) -> None:
    assert not re.search(r"\((command )?sam3-node|python3? -", script(shell))


def test_a_script_leaves_the_parsers_as_they_were() -> None:
    write_script("bash", command_parser())
    # a detector of another package, which completion does not offer
    parsed = command_parser().parse_args(["run", "--detector.kind", "my-own"])
    assert vars(parsed)["detector.kind"] == "my-own"


def test_the_command_prints_the_script_or_writes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sam3_node", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, script("bash"), "")
    path = tmp_path / "new/folder/sam3-node"
    assert main(["completion", "bash", "--out", str(path)]) == 0
    assert path.read_text() == script("bash")

"""Completion of `sam3-node` by the script that the command writes, in a real bash; zsh and fish where installed."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sam3_node.cli.main import main
from sam3_node.cli.shell_completion import SHELLS, write_script
from tests.support.command_line import command_parser
from tests.support.patience import PATIENCE_S

ASK = """
source "$1"
shift
complete -p sam3-node
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_sam3_node
printf '%s\\n' "${COMPREPLY[@]}"
"""


@cache
def script(shell: str) -> str:
    return write_script(shell, command_parser())


def complete(folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words, behind `sam3-node`."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash is installed")
    path = folder / "completion.bash"
    path.write_text(script("bash"))
    command = [bash, "--norc", "-c", ASK, "bash", str(path), "sam3-node", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    registered, *offered = done.stdout.splitlines()
    assert registered == "complete -o bashdefault -o default -F _sam3_node sam3-node"
    return [word for word in offered if word]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["re"], ["record", "resume", "reset", "replay"]),
        (["object", ""], ["add", "refine", "remove", "rename", "points", "list"]),
        (["--profile", "a.toml", "object", "ren"], ["rename"]),
        (["object", "add", "--bo"], ["--box"]),
        (["replay", "a.mcap", "--strategy", ""], ["forward", "bidirectional", "multi-shot"]),
        (["replay", "a.mcap", "--strategy", "=", "m"], ["multi-shot"]),
        (["replay", "a.mcap", "--strategy", "="], ["forward", "bidirectional", "multi-shot"]),
        (["run", "--detector.kind", "y"], ["yolo-world"]),
        (["run", "--transport.fr"], ["--transport.frames"]),
        (["completion", ""], list(SHELLS)),
        # bash itself offers files
        (["replay", "a.mcap", "-o", ""], []),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_offers_what_may_follow(words: list[str], offered: list[str], tmp_path: Path) -> None:
    assert complete(tmp_path, *words) == offered


def test_bash_offers_all_commands_and_their_own_options(tmp_path: Path) -> None:
    first = complete(tmp_path, "")
    assert {"run", "camera", "replay", "completion"} <= set(first)
    options = complete(tmp_path, "replay", "-")
    assert {"-o", "--out", "--prompt", "--sure-only"} <= set(options)
    assert not [option for option in options if "." in option]


def test_no_word_is_special_to_a_shell() -> None:
    lists = re.findall(r'(?:commands|options|values)="([^"]*)"', script("bash"))
    assert sum(map(len, lists)) > 1000
    assert all(re.fullmatch(r"[\w.:+, -]*", words) for words in lists)


def test_the_script_starts_no_program() -> None:
    for shell in SHELLS:
        lines = script(shell).splitlines()
        assert not [line for line in lines if re.search(r"\$\(sam3-node|\(sam3-node|python", line)]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_valid_in_its_shell(shell: str, tmp_path: Path) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} is installed")
    path = tmp_path / f"completion.{shell}"
    path.write_text(script(shell))
    done = subprocess.run([program, "-n", path], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_has_commands_options_and_values() -> None:
    lines = script("fish").splitlines()
    assert any("'__sam3_node_path \"object\"' -f -a add -d 'track a" in line for line in lines)
    assert any("-l strategy" in line and "-x -a 'forward bidirectional multi-shot'" in line for line in lines)
    assert any("-l detector.kind" in line and "yolo-world" in line for line in lines)
    # an odd number of quotes would swallow the next line
    assert not [line for line in lines if line.replace("\\'", "").count("'") % 2]


def test_the_command_prints_the_script_or_writes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sam3_node", "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, script("bash"), "")
    path = tmp_path / "new/folder/sam3-node"
    assert main(["completion", "bash", "--out", str(path)]) == 0
    assert path.read_text() == script("bash")

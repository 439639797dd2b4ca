"""Writes scripts that complete `sam3-node` in bash, zsh and fish; shtab makes them from the parser of the command line.

A script holds all words itself, so that a press of Tab starts no Python. It is written again after an update.
"""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ..files import make_folder, write_output
from ..settings import Settings, options
from .parser import CommandParser, Commands

SHELLS = ("bash", "zsh", "fish")


def add_commands(commands: Commands, parser: CommandParser) -> None:
    """Add the command `completion`, for all commands of this parser."""

    def completion(args: Namespace, settings: Settings) -> None:
        """Print a script that completes commands, options and their values in a shell."""
        script = write_script(args.shell, parser)
        if args.out is None:
            print(script, end="")
            return
        make_folder(args.out.parent)
        write_output(args.out, script.encode())

    added = commands.add("completion", completion)
    added.add("shell SHELL", "bash, zsh or fish", choices=SHELLS)
    added.add_path("--out FILE", "write the script into this file, in place of printing it")


def write_script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script of one of SHELLS."""
    import shtab

    # other parsers share the actions of settings
    before = [(action, dict(vars(action))) for action in _list_actions(parser)]
    try:
        _prepare(parser)
        return shtab.complete(parser, shell) + "\n"
    finally:
        for action, attributes in before:
            vars(action).clear()
            vars(action).update(attributes)


def _prepare(parser: argparse.ArgumentParser) -> None:
    """Give the actions of a parser what shtab reads."""
    import shtab

    values = {option.name: option.choices for option in options()}
    # a flag may stand alone
    values |= {option.name: ("true", "false") for option in options() if option.is_flag}
    for action in list(_list_actions(parser)):
        action.choices = action.choices or values.get(action.dest) or None
        takes_value = action.nargs != 0 and action.type in (None, Path)
        if takes_value and not action.choices:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        # a menu has a line for each
        action.help = (action.help or "").partition(". ")[0]
        # zsh separates parts of an option's description by these
        if isinstance(action.metavar, str):
            action.metavar = re.sub(r"[][:]", " ", action.metavar)


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of all commands in it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _list_actions(command)
        else:
            yield action

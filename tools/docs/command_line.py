"""Reference of the command line, from its argparse parsers."""

import argparse
from collections import Counter
from collections.abc import Iterator

from sam3_node.cli import main as cli

from .tables import code, table

_COMMON = ("help", "profile", argparse.SUPPRESS)
_Row = tuple[str, str]
MANY = 3  # commands with the same option, so that it is listed once


def command_reference() -> str:
    """Return links to the commands, a table of the options that many have, and a section for each command."""
    listed = list(commands(cli._parser()))
    options = {
        words: [_row(action) for action in parser._actions if _is_own(action)] for words, parser in listed
    }
    counts = Counter(row for own in options.values() for row in own)
    shared = [row for row, count in counts.items() if count >= MANY]
    links = ", ".join(f"[{' '.join(words[1:])}](#{'-'.join(words)})" for words, _ in listed)
    sections = [_section(words, parser, options[words], shared) for words, parser in listed]
    return "\n\n".join([f"{links}.", table(["option of several commands", "meaning"], shared), *sections])


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ("sam3-node",)
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Yield the words and the parser of each command that runs something."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for name, inner in group.choices.items():
            yield from commands(inner, (*words, name))
    if not groups:
        yield words, parser


def _section(
    words: tuple[str, ...], parser: argparse.ArgumentParser, own: list[_Row], shared: list[_Row]
) -> str:
    also = [name for name, meaning in own if (name, meaning) in shared]
    description = (parser.description or "").rstrip(".?")
    parts = [f"## {' '.join(words)}", f"{description[:1].upper()}{description[1:]}."]
    if rest := [row for row in own if row not in shared]:
        parts.append(table(["option", "meaning"], rest))
    return "\n\n".join([*parts, *([f"Also {', '.join(also)}."] if also else [])])


def _row(action: argparse.Action) -> _Row:
    return code(_name(action)), (action.help or "").replace("%%", "%")


def _is_own(action: argparse.Action) -> bool:
    """Return True unless the option is a setting, or is common to all commands."""
    is_setting = "." in action.dest and f"--{action.dest}" in action.option_strings
    return action.dest not in _COMMON and action.help != argparse.SUPPRESS and not is_setting


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _name(action: argparse.Action) -> str:
    value = _value(action)
    if action.option_strings:
        return " ".join(filter(None, [", ".join(action.option_strings), value]))
    repeated = f"{value} ..." if action.nargs in ("*", "+") else value
    return f"[{repeated}]" if action.nargs in ("?", "*") else repeated

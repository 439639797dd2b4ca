"""Reference of the command line, from its argparse parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from sam3_node.cli import main as cli

from .tables import code, table

_COMMON = ("help", "profile", argparse.SUPPRESS)


def command_reference() -> str:
    """Return a table of the commands, and a section for each: what it does, its usage and its own options."""
    listed = list(commands(cli._parser()))
    rows = [[_link(words), _sentence(parser.description or "")] for words, parser in listed]
    sections = [_section(words, parser) for words, parser in listed]
    return "\n\n".join([table(["command", "what it does"], rows), *sections])


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


def _section(words: tuple[str, ...], parser: argparse.ArgumentParser) -> str:
    actions = [action for action in parser._actions if _is_own(action)]
    usage = " ".join([*words, *map(_usage, actions)])
    parts = [f"## {' '.join(words)}", f"{_sentence(parser.description or '')}", f"```text\n{usage}\n```"]
    rows = [[code(_name(action)), (action.help or "").replace("%%", "%")] for action in actions]
    if rows:
        parts.append(table(["option", "meaning"], rows))
    return "\n\n".join(parts)


def _is_own(action: argparse.Action) -> bool:
    """Return True unless the option is a setting, or is common to all commands."""
    is_setting = "." in action.dest and f"--{action.dest}" in action.option_strings
    return action.dest not in _COMMON and action.help != argparse.SUPPRESS and not is_setting


def _link(words: tuple[str, ...]) -> str:
    return f"[`{' '.join(words)}`](#{'-'.join(words)})"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _name(action: argparse.Action) -> str:
    return " ".join(filter(None, [", ".join(action.option_strings), _value(action)]))


def _usage(action: argparse.Action) -> str:
    value = _value(action)
    if not action.option_strings:
        repeated = f"{value} ..." if action.nargs in ("*", "+") else value
        return f"[{repeated}]" if action.nargs in ("?", "*") else repeated
    text = " ".join(filter(None, [action.option_strings[0], value]))
    return text if action.required else f"[{text}]"

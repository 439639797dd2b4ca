"""Parsers of the command line: settings have a help of their own, and a misspelt name is answered with the nearest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import did_you_mean
from ..settings import old_names, options
from .commands import ANSWER_TIMEOUT_S, Command

MAX_TIMEOUT_S = 86_400.0
FAILED, NO_ANSWER, DEVICE_FAILED = 2, 3, 4
"""Exit codes of errors. argparse exits with 2, too."""


class CommandParser(argparse.ArgumentParser):
    """A parser that lists settings in `--help-settings` only, and answers a misspelt word with the nearest."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _HelpFormatter, **keywords})

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse all arguments. For an unknown one, print the usage of its command and exit with 2."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            parser: CommandParser = getattr(parsed, "parser", self)
            parser.refuse(unknown[0])
        return parsed

    def refuse(self, word: str) -> NoReturn:
        """Print the usage and the option that is most similar to an unknown word, and exit with 2."""
        nearest = did_you_mean(word.partition("=")[0], self._option_string_actions)
        self.error(f"unknown argument {word}{nearest if word.startswith('-') else ''}")

    def format_help(self) -> str:
        """Return the help without the settings."""
        return self._format_help_of(lambda group: not _holds_settings(group))

    def format_settings(self) -> str:
        """Return the help of the settings alone."""
        return self._format_help_of(_holds_settings)

    def _format_help_of(self, is_shown: Callable[[Any], bool]) -> str:
        groups = self._action_groups
        self._action_groups = [group for group in groups if is_shown(group)]
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"expected one of {', '.join(names)}, found {value!r}{did_you_mean(value, names)}"
            )


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter that leaves the settings out of the usage line, which they would fill."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if not _is_setting(action)]
        super().add_usage(usage, shown, groups, prefix)


class _PrintSettings(argparse.Action):
    """Prints the help of the settings and exits, as --help does for the other options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(parser.format_settings(), sys.stdout)
        parser.exit()


def _is_setting(action: argparse.Action) -> bool:
    return "." in action.dest and f"--{action.dest}" in action.option_strings


def _holds_settings(group: Any) -> bool:
    return any(_is_setting(action) for action in group._group_actions if action.help != argparse.SUPPRESS)


def add_command(
    common: argparse.ArgumentParser, parsers: Any, name: str, run: Command, text: str
) -> argparse.ArgumentParser:
    """Add a command with its function and its help text, and with the options of `common`."""
    parser: argparse.ArgumentParser = parsers.add_parser(name, parents=[common], help=text, description=text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_command_group(parsers: Any, name: str, text: str) -> Any:
    """Add a command that has commands of its own. Return their subparsers."""
    return parsers.add_parser(name, help=text, description=text).add_subparsers(
        metavar="COMMAND", required=True
    )


def make_settings_parser() -> argparse.ArgumentParser:
    """Create the parent parser of all commands: --profile, and one option for each setting."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", type=Path, metavar="FILE.toml", help="TOML file of settings")
    parser.add_argument(
        "--help-settings",
        action=_PrintSettings,
        nargs=0,
        dest=argparse.SUPPRESS,
        help="list the settings, such as --transport.control, each of which is an option too",
    )
    groups: dict[str, Any] = {}
    for option in options():
        section, _, name = option.name.partition(".")
        if not option.is_text:
            continue
        if section not in groups:
            groups[section] = parser.add_argument_group(f"{section} settings")
        groups[section].add_argument(
            f"--{option.name}",
            default=argparse.SUPPRESS,
            metavar="{" + ",".join(option.choices) + "}" if option.choices else name.upper(),
            help=f"{option.help} [{option.default}]".replace("%", "%%"),
            **({"nargs": "?", "const": "true"} if option.is_flag else {}),
        )
    for old_name in old_names():
        parser.add_argument(f"--{old_name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse_limit(parse: Callable[[str], float]) -> Callable[[str], tuple[str, float]]:
    """Return a parser of NAME=NUMBER."""

    def limit(text: str) -> tuple[str, float]:
        name, _, value = text.rpartition("=")
        try:
            number = parse(value)
        except ValueError:
            name = ""
        if not name:
            raise argparse.ArgumentTypeError(f"expected NAME=NUMBER, found {text!r}")
        return name, number

    return limit


def parse_numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    """Return a parser of `count` numbers with commas between them."""

    def numbers(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError:
            values = ()
        if len(values) != count:
            raise argparse.ArgumentTypeError(f"expected {count} numbers separated by commas, found {text!r}")
        return values

    return numbers


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Add the option --timeout of commands that send requests."""
    parser.add_argument(
        "--timeout",
        type=parse_timeout,
        default=ANSWER_TIMEOUT_S,
        metavar="S",
        help=f"seconds to wait for the node's answer [{ANSWER_TIMEOUT_S:g}]; exit code {NO_ANSWER} when they pass",
    )


def parse_timeout(text: str) -> float:
    """Parse a number of seconds, more than 0 and at most a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"expected seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}, found {text!r}"
        )
    return seconds

"""Parsers of the command line. Settings have a help of their own, and a misspelt name is answered with the nearest."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from ..errors import did_you_mean
from ..schema.describing import NOUNS, find_field
from ..settings import Settings, options

MAX_TIMEOUT_S = 86_400.0
"""Longest --timeout: a day. A longer one is a mistake, such as milliseconds."""
ANSWER_TIMEOUT_S = 3.0
"""Seconds that a command waits for the node's answer, unless --timeout says otherwise."""
FAILED = 2
"""Exit code of all errors that have none of their own. argparse exits with 2, too."""
NO_ANSWER = 3
"""Exit code when the node does not answer in time."""
DEVICE_FAILED = 4
"""Exit code when the GPU has failed, so that a new process may help."""

T = TypeVar("T")
NUMBERS = {int: "a whole number", float: "a number"}
"""What an error names as expected, by the type of an argument."""

Command = Callable[[argparse.Namespace, Settings], int | None]
"""A command. It returns its exit code; None means 0."""


class CommandParser(argparse.ArgumentParser):
    """A parser that lists settings in `--help-settings` only, and answers a misspelt word with the nearest."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _HelpFormatter, **keywords})

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse all arguments. For an unknown one, print the usage of its command and exit with 2."""
        # `parse_args` would name the whole program in its error, not the command
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            parser: CommandParser = getattr(parsed, "parser", self)
            parser.refuse(unknown[0])
        return parsed

    def refuse(self, word: str) -> NoReturn:
        """Print the usage and the option that is most similar to an unknown word, and exit with 2."""
        hint = ""
        if word.startswith("-"):
            hint = did_you_mean(word.partition("=")[0], self._option_string_actions)
        self.error(f"unknown argument {word}{hint}")

    def add(
        self, spec: str, help: str, type: Any = None, default: Any = None, group: Any = None, **options: Any
    ) -> None:
        """Add an argument, to a group if one is given.

        `spec` is as the help shows it: "-o, --out FILE" or "--label"; of a positional one, name and metavar: "id ID".
        """
        *short, named = spec.split(", ")
        name, _, metavar = named.partition(" ")
        options |= {"metavar": metavar or None, "type": type, "default": default}
        (group or self).add_argument(*short, name, help=help, **options)

    def add_field(self, spec: str, kind: type[msgspec.Struct], **options: Any) -> None:
        """Add the argument of an operation: its type, bounds, choices and meaning are those of its field.

        `spec` is that of `add`. Without a metavar, the field is a truth value, and the option a flag.
        """
        name = spec.partition(" ")[0].removeprefix("--").replace("-", "_")
        field = find_field(kind, name)
        if field.kind is bool:
            self.add_flag(spec, field.sentence)
            return
        if field.kind in NOUNS:
            options["type"] = field.read_text
        self.add(spec, field.sentence, choices=field.choices or None, **options)

    def add_flag(self, name: str, help: str) -> None:
        """Add an option without a value. It is False if it is not given."""
        self.add_argument(name, action="store_true", help=help)

    def add_path(self, spec: str, help: str, **options: Any) -> None:
        """Add an argument that names a file or a folder."""
        self.add(spec, help, Path, **options)

    def add_repeated(self, spec: str, help: str, type: Any = None, **options: Any) -> None:
        """Add an option that may be repeated. Its values are a list."""
        self.add(spec, f"{help}; may be repeated", type, default=[], action="append", **options)

    def add_setting(self, spec: str, setting: str, help: str) -> None:
        """Add an option, or the metavar of a positional argument, that sets a setting."""
        if spec.startswith("-"):
            self.add(spec, help, default=argparse.SUPPRESS, dest=setting)
        else:
            self.add(f"{setting} {spec}", help, default=argparse.SUPPRESS, nargs="?")

    def add_timeout(self, takes_long: bool = False) -> None:
        """Add the option --timeout of commands that send requests. If the answer `takes_long`, it has no default."""
        default: float | None = ANSWER_TIMEOUT_S
        usual = f"{ANSWER_TIMEOUT_S:g}"
        if takes_long:
            default = None
            usual += " until it is connected, then 60"
        text = f"seconds to wait for the node's answer [{usual}]; exit code {NO_ANSWER} when they pass"
        self.add("--timeout S", text, parse_timeout, default)

    def format_help(self) -> str:
        """Return the help: the settings that people use most with this command, and its examples."""
        name = self.prog.partition(" ")[2]
        more = load_examples()
        # the few settings that belong to this command, in a section of their own
        settings = {action.dest: action for action in self._actions if is_setting(action)}
        formatter = self._get_formatter()
        formatter.start_section("settings that are used most (all: --help-settings, or of one GROUP)")
        formatter.add_arguments([settings[used] for used in more["settings"].get(name, ())])
        formatter.end_section()
        # a group of commands has no examples itself: the first one of each of its commands stands for them
        inner = [lines[0] for key, lines in more["examples"].items() if key.startswith(f"{name} ")]
        examples = "".join(f"  {line}\n" for line in more["examples"].get(name, inner))
        text = self._format_help_of(lambda group: not _holds_settings(group))
        return f"{text}\n{formatter.format_help()}\nexamples:\n{examples}"

    def format_settings(self, section: str | None = None) -> str:
        """Return the help of the settings alone, of all sections or of one."""
        # argparse titles each section of settings so
        end = ""
        if section is not None:
            end = f"{section} settings"
        return self._format_help_of(lambda group: _holds_settings(group) and end in ("", group.title))

    def _format_help_of(self, is_shown: Callable[[Any], bool]) -> str:
        # argparse formats all groups that it knows: hide the others meanwhile
        groups = self._action_groups
        self._action_groups = [group for group in groups if is_shown(group)]
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Parse a value. The error names what was expected, where argparse would name a function."""
        kind: Any = action.type or str
        try:
            return kind(arg_string)
        except ValueError as error:
            # a type such as int says nothing that a user understands
            text = str(error)
            if kind in NUMBERS:
                text = f"expected {NUMBERS[kind]}, found {arg_string!r}"
            raise argparse.ArgumentError(action, text) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            # argparse would list the choices, and not say which of them is meant
            names = list(map(str, action.choices))
            raise argparse.ArgumentError(
                action, f"expected one of {', '.join(names)}, found {value!r}{did_you_mean(value, names)}"
            )


class Commands:
    """The commands of a parser. Each gets the options of `common`."""

    def __init__(
        self, parser: argparse.ArgumentParser, common: argparse.ArgumentParser, **options: Any
    ) -> None:
        self._parsers: Any = parser.add_subparsers(metavar="COMMAND", required=True, **options)
        self._common = common

    def add(self, name: str, run: Command) -> CommandParser:
        """Add a command with its function. Its help is the beginning of the function's docstring."""
        # the docstring says it once, as a sentence; the help has it without capital and point
        said = " ".join((run.__doc__ or "").partition("\n\n")[0].split()).removesuffix(".")
        text = said[:1].lower() + said[1:]
        parser: CommandParser = self._parsers.add_parser(
            name, parents=[self._common], help=text, description=text
        )
        parser.set_defaults(run=run, parser=parser)
        return parser

    def add_group(self, name: str, text: str) -> Commands:
        """Add a command that has commands of its own. Return them."""
        return Commands(self._parsers.add_parser(name, help=text, description=text), self._common)


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter that leaves the settings out of the usage line, which they would fill."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        shown = [action for action in actions if not is_setting(action)]
        super().add_usage(usage, shown, groups, prefix)


class _PrintSettings(argparse.Action):
    """Prints the help of the settings, or of one section, and exits, as --help does for the other options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser._print_message(parser.format_settings(values), sys.stdout)
        parser.exit()


@cache
def load_examples() -> dict[str, dict[str, list[str]]]:
    """Return the examples of each command, and the settings that are used most with it."""
    return tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))


def is_setting(action: argparse.Action) -> bool:
    """Return True for the option of a setting."""
    return "." in action.dest and f"--{action.dest}" in action.option_strings


def _holds_settings(group: Any) -> bool:
    return any(map(is_setting, group._group_actions))


def make_settings_parser() -> argparse.ArgumentParser:
    """Create the parent parser of all commands: --profile, and one option for each setting."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", type=Path, metavar="FILE.toml", help="TOML file of settings")
    listing = parser.add_argument(
        "--help-settings",
        action=_PrintSettings,
        nargs="?",
        metavar="GROUP",
        dest=argparse.SUPPRESS,
        help="list the settings, such as --transport.control, each of which is an option too; "
        "with GROUP, such as transport, those of one group",
    )
    groups: dict[str, Any] = {}
    for option in options():
        # a setting that is no text can be set in a profile only
        if not option.is_text:
            continue
        section, _, name = option.name.partition(".")
        if section not in groups:
            groups[section] = parser.add_argument_group(f"{section} settings")
        metavar = name.upper()
        if option.choices:
            metavar = "{" + ",".join(option.choices) + "}"
        # a flag may stand alone, which means true
        flag: dict[str, Any] = {"nargs": "?", "const": "true"} if option.is_flag else {}
        groups[section].add_argument(
            f"--{option.name}",
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=f"{option.help} [{option.default}]".replace("%", "%%"),
            **flag,
        )
    # known only now, because the sections come from the settings
    listing.choices = list(groups)
    return parser


def parse_count(text: str) -> int:
    """Parse a whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def parse_named(parse: Callable[[str], T], what: str = "NUMBER") -> Callable[[str], tuple[str, T]]:
    """Return a parser of NAME=NUMBER, or of what else `parse` reads."""

    def named(text: str) -> tuple[str, T]:
        # the name may contain =, the value may not
        name, _, value = text.rpartition("=")
        # the error of `parse` would not name the form of the whole
        try:
            parsed = parse(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"expected NAME={what}, found {text!r}")
        return name, parsed

    return named


def _parse_numbers(text: str, count: int) -> tuple[float, ...]:
    try:
        # text that is no number at all has the same error as a wrong count
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if len(values) != count:
        raise ValueError(f"expected {count} numbers separated by commas, found {text!r}")
    return values


parse_point = partial(_parse_numbers, count=2)
"""Parse X,Y."""
parse_box = partial(_parse_numbers, count=4)
"""Parse X0,Y0,X1,Y1."""


def parse_timeout(text: str) -> float:
    """Parse a number of seconds, more than 0 and at most a day."""
    try:
        # this comparison refuses NaN, too
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"expected seconds, more than 0 and at most {MAX_TIMEOUT_S:.0f}, found {text!r}")
    return seconds

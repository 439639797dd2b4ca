"""Command-line entry point: `sam3-node COMMAND`. Each command imports its heavy dependencies when it runs."""

import sys
from collections.abc import Sequence

from ..errors import DeviceError, NoAnswerError, Sam3NodeError, find_version
from ..processes.logs import (
    discard_stdout,
    format_line,
    install_log_handler,
    use_environment_format,
    use_format,
)
from ..processes.notify import TRY_AGAIN, Watchdog, is_supervised
from ..processes.signals import INTERRUPTED
from ..settings import load_settings
from . import artifacts, calibrate, engine, replay, requests, services, shell_completion
from .parser import DEVICE_FAILED, FAILED, NO_ANSWER, CommandParser, Commands, make_settings_parser
from .progress import printable

EXIT_CODES: dict[type[Sam3NodeError], int] = {NoAnswerError: NO_ANSWER, DeviceError: DEVICE_FAILED}
"""Exit codes of errors that a script may want to tell apart. All others exit with FAILED."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Sam3NodeErrors are printed on stderr."""
    # a supervisor repeats a start that may succeed later; a person at a terminal decides that alone
    supervised = is_supervised()
    Watchdog.began = False
    use_environment_format()
    try:
        args = _parser().parse(arguments)
        handler = install_log_handler()
        # options with a point in their name are settings, all others are the command's own
        overrides = {name: value for name, value in vars(args).items() if "." in name}
        settings = load_settings(args.profile, overrides)
        handler.configure(settings.logging.format, settings.logging.limit)
        use_format(settings.logging.format)
        code = args.run(args, settings)
        # a reader that has gone is noticed here, and not in the interpreter's flush at exit
        sys.stdout.flush()
        return code or 0
    except Sam3NodeError as error:
        _print_error(printable(str(error), line_feeds=True))
        code = EXIT_CODES.get(type(error), FAILED)
        if code == FAILED and supervised and (error.may_pass or Watchdog.began):
            return TRY_AGAIN
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of the output has gone; the interpreter's flush at exit must not raise again
        discard_stdout()
        return 0
    except OSError as error:  # of a file that vanished meanwhile, or a folder without rights
        place = f"{error.filename}: " if error.filename else ""
        _print_error(f"{printable(place)}{error.strerror or error}")
        return FAILED


def _print_error(text: str) -> None:
    """Print why a command has failed, in the format of the log."""
    print(format_line(f"sam3-node: error: {text}", "error"), file=sys.stderr)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sam3-node",
        description="Track objects: receive camera frames over ZeroMQ, publish instance masks.",
        epilog="Every command takes --profile FILE.toml, one option for each setting (sam3-node run --help-settings), "
        "and has examples: sam3-node COMMAND --help",
    )
    parser.add_argument(
        "--version", action="version", version=f"sam3-node {find_version('sam3-node') or '(not installed)'}"
    )
    # each module adds its own commands, in the order of the help
    commands = Commands(parser, make_settings_parser(), title="commands")
    services.add_commands(commands)
    requests.add_commands(commands)
    artifacts.add_commands(commands)
    engine.add_commands(commands)
    calibrate.add_commands(commands)
    replay.add_commands(commands)
    shell_completion.add_commands(commands, parser)
    return parser

"""The parser of the command line, for tests of what pages, profiles and images tell people to type."""

from sam3_node.cli import main as cli
from sam3_node.cli.parser import CommandParser


def command_parser() -> CommandParser:
    """Return a new parser of all commands of `sam3-node`."""
    return cli._parser()

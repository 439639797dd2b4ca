"""The parser of the command line, for tests of what pages, profiles and images tell people to type."""

from functools import cache

from sam3_node.cli import main as cli
from sam3_node.cli.parser import CommandParser


@cache
def command_parser() -> CommandParser:
    """Return the parser of all commands of `sam3-node`. Building it takes longer than parsing a hundred commands."""
    return cli._parser()

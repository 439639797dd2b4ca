"""Writes scripts that complete `sam3-node` in bash, zsh and fish, from the parser of the command line.

A script holds all words itself, so that a press of Tab starts no Python. It is written again after an update.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..files import make_folder, write_output
from ..settings import Settings
from .parser import CommandParser, Commands, is_setting

SHELLS = ("bash", "zsh", "fish")


@dataclass(slots=True)
class Words:
    """What may follow a command: its own commands, its options, and the values of options that have a choice."""

    commands: dict[str, str] = field(default_factory=dict)
    """Help by name."""
    options: dict[str, str] = field(default_factory=dict)
    """Help by name, without the settings."""
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Values by option. Any value, such as a file, follows an option that is not here."""
    arguments: tuple[str, ...] = ()
    """Values of positional arguments."""


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
    words = {" ".join(path): found for path, found in _collect(parser)}
    settings = _collect_settings(parser)
    if shell == "fish":
        return _write_fish(words, settings)
    script = _write_bash(words, settings)
    if shell == "zsh":
        # zsh takes completions of bash, and describes none of them
        return f"autoload -U +X compinit bashcompinit && compinit && bashcompinit\n{script}"
    return script


def _collect(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Words]]:
    """Yield the words of a parser and of all commands in it, each with the path of its command."""
    words = Words()
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            words.commands |= {name: helps.get(name, "") for name in action.choices}
            inner += action.choices.items()
        elif is_setting(action):
            continue
        elif not action.option_strings:
            words.arguments += tuple(map(str, action.choices or ()))
        else:
            for name in action.option_strings:
                words.options[name] = (action.help or "").replace("%%", "%")
                if action.choices:
                    words.values[name] = tuple(map(str, action.choices))
    yield path, words
    for name, command in inner:
        yield from _collect(command, (*path, name))


def _collect_settings(parser: argparse.ArgumentParser) -> Words:
    """Return the options that every command has for the settings."""
    from ..settings import options

    settings = Words()
    for option in options():
        if option.is_text:
            settings.options[f"--{option.name}"] = option.help
            if option.choices:
                settings.values[f"--{option.name}"] = tuple(option.choices)
    return settings


_BASH = """\
# completes sam3-node; made by: sam3-node completion
_sam3_node() {
    local word="${COMP_WORDS[COMP_CWORD]}" option="${COMP_WORDS[COMP_CWORD-1]}" path="" next="" i
    local commands="" options="" values=""
    # --option=value comes in three words
    if [ "$word" = "=" ]; then
        word=""
    elif [ "$option" = "=" ]; then
        option="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        next="${path:+$path }${COMP_WORDS[i]}"
        case "$next" in
            @paths@) path="$next" ;;
        esac
    done
    case "$path" in
@words@
    esac
    case "$path:$option" in
@values@
    esac
    COMPREPLY=()
    if [ -n "$values" ]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
        return
    fi
    case "$word" in
        --?*) COMPREPLY=($(compgen -W "$options @settings@" -- "$word")) ;;
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$commands" -- "$word")) ;;
    esac
}
complete -o bashdefault -o default -F _sam3_node sam3-node
"""


def _write_bash(words: dict[str, Words], settings: Words) -> str:
    # settings have the same values after every command
    values = [(f'*":{option}"', found) for option, found in settings.values.items()]
    for path, own in words.items():
        values += [(f'"{path}:{option}"', found) for option, found in own.values.items()]
    parts = {
        "@paths@": "|".join(f'"{path}"' for path in words if path),
        "@words@": "\n".join(
            f'        "{path}") commands="{" ".join((*own.commands, *own.arguments))}"; '
            f'options="{" ".join(own.options)}" ;;'
            for path, own in words.items()
        ),
        "@values@": "\n".join(
            f'        {pattern}) values="{" ".join(found)}" ;;' for pattern, found in values
        ),
        "@settings@": " ".join(settings.options),
    }
    script = _BASH
    for name, text in parts.items():
        script = script.replace(name, text, 1)
    return script


_FISH = """\
# completes sam3-node; made by: sam3-node completion
function __sam3_node_path
    set -l path
    for word in (commandline -opc)[2..-1]
        set -l next (string join " " $path $word)
        contains -- $next @paths@; and set path $next
    end
    test "$path" = "$argv[1]"
end
"""


def _write_fish(words: dict[str, Words], settings: Words) -> str:
    lines = [_FISH.replace("@paths@", " ".join(shlex.quote(path) for path in words if path), 1)]
    for path, own in words.items():
        test = f"complete -c sam3-node -n '__sam3_node_path \"{path}\"'"
        for name, text in own.commands.items():
            lines.append(f"{test} -f -a {name} -d {_quote_fish(text)}")
        if own.arguments:
            lines.append(f"{test} -f -a {shlex.quote(' '.join(own.arguments))}")
        lines += [f"{test} {_describe_fish(name, text, own.values)}" for name, text in own.options.items()]
    for name, text in settings.options.items():
        lines.append(f"complete -c sam3-node {_describe_fish(name, text, settings.values)}")
    return "\n".join(lines) + "\n"


def _describe_fish(name: str, text: str, values: dict[str, tuple[str, ...]]) -> str:
    """Return the options of fish's `complete` for an option."""
    kind = "-l" if name.startswith("--") else "-s"
    described = f"{kind} {name.lstrip('-')} -d {_quote_fish(text)}"
    if name in values:
        described += f" -x -a {shlex.quote(' '.join(values[name]))}"
    return described


def _quote_fish(text: str) -> str:
    # the first sentence; fish takes \\ and ' in quotes for its own
    said = " ".join(text.split()).partition(". ")[0]
    return "'" + said.replace("\\", "\\\\").replace("'", "\\'") + "'"

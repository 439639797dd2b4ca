"""Tables of the settings."""

from __future__ import annotations

from itertools import groupby

from sam3_node.settings import Option, Settings, options

from .tables import code, table


def setting_table() -> str:
    """Return links to the sections of the settings, and a table for each: name, default and meaning."""
    parts = ["Sections: " + ", ".join(f"[{section}](#{section})" for section in Settings.model_fields) + "."]
    for section, fields in groupby(options(), lambda option: option.name.split(".")[0]):
        rows = [[code(field.name), code(field.default), _describe(field)] for field in fields]
        parts.append(f"## {section}\n\n" + table(["setting", "default", "meaning"], rows))
    return "\n\n".join(parts)


def _describe(option: Option) -> str:
    choices = ", ".join(map(code, option.choices))
    return f"{option.help} One of {choices}." if choices else option.help

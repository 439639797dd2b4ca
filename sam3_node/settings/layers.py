"""The layers that fill the tree of settings: a profile, the environment and the command line.

The command line overrides the environment (SAM3_*), and the environment overrides the TOML profile.
"""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource
from pydantic_settings.exceptions import SettingsError as EnvironmentDecodeError

from ..errors import SettingsError, did_you_mean
from .tree import DELIMITER, PREFIX, CameraSettings, Settings, are_same_endpoint, options

Layers = Mapping[str, Mapping[str, Any]]


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file. Raises SettingsError that names the file and the position of the fault."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        nearest = did_you_mean(path, map(str, path.parent.glob("*.toml")))
        raise SettingsError(f"cannot read {path}: {error.strerror}{nearest}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def load_settings(profile: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Build the tree from a TOML profile, the environment and `overrides` ({"model.name": "nano", …}).

    Relative paths in the profile start at its folder; other relative paths start at the working directory.
    Raises SettingsError that names each wrong field as section.field, and the layer that set it.
    """
    folder = None if profile is None else profile.absolute().parent
    layers = {f"in {profile}": _complete(read_toml(profile), folder)} if profile is not None else {}
    layers |= {
        "in the environment": _complete(_environment(), None),
        "on the command line": _complete(_nest(overrides or {}), None),
    }
    try:
        settings = Settings(**_merge(layers))
    except ValidationError as error:
        raise SettingsError(_explain(error, layers)) from error
    _check_endpoints(settings)
    return settings


def _check_endpoints(settings: Settings) -> None:
    """Raise SettingsError if two settings name the same endpoint: one process would take it from the other."""
    transport = settings.transport
    named = [("transport.frames", endpoint) for endpoint in transport.frames]
    named += [("transport.masks", transport.masks), ("transport.control", transport.control)]
    named += [("spatial.poses", settings.spatial.poses)]
    for (name, endpoint), (other_name, other) in itertools.combinations(named, 2):
        if name != other_name and are_same_endpoint(endpoint, other):
            raise SettingsError(
                f"{name} and {other_name}: expected an endpoint each, found {endpoint} and {other}, which are the same;"
                " choose another port or path for one of them"
            )


def _environment() -> dict[str, Any]:
    _check_variables(os.environ)
    try:
        return EnvSettingsSource(Settings)()
    except EnvironmentDecodeError as error:
        raise SettingsError(f"settings in the environment: {error} ({error.__cause__})") from error


def _check_variables(environment: Iterable[str]) -> None:
    """Raise SettingsError for a variable that starts with SAM3_ and is neither a setting nor a section."""
    names = [*(option.name for option in options()), *Settings.model_fields]
    variables = {f"{PREFIX}{name.replace('.', DELIMITER)}".upper() for name in names}
    for variable in sorted(environment):
        if variable.upper().startswith(PREFIX) and variable.upper() not in variables:
            raise SettingsError(
                f"environment variable {variable}: no setting has this name{did_you_mean(variable, sorted(variables))}"
            )


def _nest(overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in overrides.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def _complete(layer: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a layer with its paths in full."""
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    return {
        name: sections[name].with_full_paths(fields, folder) if name in sections else fields  # type: ignore[union-attr]
        for name, fields in layer.items()
    }


def _merge(layers: Layers) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for layer in layers.values():
        for section, fields in layer.items():
            lower = tree.get(section)
            if isinstance(lower, Mapping) and isinstance(fields, Mapping):
                tree[section] = {**lower, **fields}
            else:
                tree[section] = fields
    return tree


def _explain(error: ValidationError, layers: Layers) -> str:
    lines = []
    for item in error.errors():
        field, layer = ".".join(map(str, item["loc"])), _find_layer(item["loc"], layers)
        message = "no setting has this name" if item["type"] == "extra_forbidden" else item["msg"]
        lines.append(f"{field}: {message}{_find_nearest(item)} (found {item['input']!r} {layer})")
    return "invalid settings: " + "; ".join(lines)


def _find_nearest(item: ErrorDetails) -> str:
    """Return "; did you mean NAME?" for an unknown setting or an unknown choice of one, else ""."""
    *parents, name = map(str, item["loc"])
    if item["type"] == "literal_error":
        return did_you_mean(item["input"], re.findall(r"'([^']*)'", item["ctx"]["expected"]))
    if item["type"] != "extra_forbidden":
        return ""
    if not parents:
        return did_you_mean(name, Settings.model_fields)
    in_list = len(parents) > 1  # group.cameras.INDEX
    section = CameraSettings if in_list else Settings.model_fields[parents[0]].annotation
    siblings = list(section.model_fields)  # type: ignore[union-attr]
    elsewhere = [option.name for option in options() if option.name.endswith(f".{name}")]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(name, siblings)


def _find_layer(location: tuple[int | str, ...], layers: Layers) -> str:
    """Return the name of the highest-priority layer that sets this section and field."""
    for name, layer in reversed(list(layers.items())):
        fields = layer.get(str(location[0]), {})
        names_field = len(location) == 1 or not isinstance(fields, Mapping) or location[1] in fields
        if location[0] in layer and names_field:
            return name
    return "by default"

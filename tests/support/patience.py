"""How long tests wait for what must come: a limit that only a failure meets, however busy the machine is."""

PATIENCE_S = 300.0
"""Seconds. The limit of a whole test, in pyproject.toml, is longer."""

PATIENCE_MS = 300_000
"""The same in milliseconds, for sockets and clients."""

"""Questions to the node about what keeps a command waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ..client.diagnosis import Wanted, diagnose, find_sending_camera
from ..errors import AuthenticationError, Sam3NodeError
from ..settings import Settings
from ..transport import ControlClient, Security
from ..types import Closeable

PROBE_TIMEOUT_MS = 1000


class NodeProbe(Closeable):
    """A connection to the node's control endpoint, which asks what the node does. A context manager.

    Its methods return one line of text, "" if there is nothing to say, and None if there is nothing to wait for.
    """

    def __init__(self, settings: Settings, control: str | None = None) -> None:
        transport = settings.transport
        self._wanted = Wanted(transport.masks, control or transport.control, transport.delivery, ())
        self._client = ControlClient(
            self._wanted.control, PROBE_TIMEOUT_MS, Security.from_settings(transport)
        )
        self._refusal = ""

    def explain_masks(self, connected: Callable[[], bool]) -> str:
        """Say why no masks arrive. `connected` returns True if the masks endpoint has a peer."""
        description = self._describe()
        if self._refusal:
            return self._refusal
        if connected() and find_sending_camera(description, ()):
            return ""
        return diagnose(description, self._wanted, connected())

    def explain_frames(self) -> str | None:
        """Say why the node gets no frames, or does not process them. "" if no node answers."""
        description = self._describe()
        if description is None:
            return self._refusal
        if find_sending_camera(description, ()) and not description["paused"]:
            return None
        delivery = description["settings"]["transport"]["delivery"]
        return diagnose(description, self._wanted._replace(delivery=delivery), connected=True)

    def explain_answer(self) -> str:
        """Say why the node does not answer another request."""
        if self._describe() is None:
            return self._refusal or (
                f"no node answers at {self._wanted.control}: start it with sam3-node run, correct --transport.control, "
                "or wait if it still loads its model"
            )
        return f"the node at {self._wanted.control} answers, but has not finished this request yet"

    def close(self) -> None:
        """Close the connection. Waits for a pending question. Idempotent."""
        self._client.close()

    def _describe(self) -> dict[str, Any] | None:
        self._refusal = ""
        try:
            return cast(dict[str, Any], self._client.call("describe"))
        except AuthenticationError as error:
            self._refusal = str(error)
            return None
        except Sam3NodeError:
            return None

"""What a tracker's weights can do. A model declares it once; callers ask in their own terms, and get reasons in words.

What depends on the engines and the device that serve a model, `TrackerModel` answers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Following = Literal["memories", "group memories", "last masks"]
"""How objects are followed: `tracking.following` has a way for each."""
USUAL_OBJECTS = 4
"""Number of objects of a call that a plan is tuned for. So many fill a GPU."""
ROWS_A_CALL = {"read": USUAL_OBJECTS}
"""Largest number of objects of a call of an engine: each needs memory (256 MB of the read at 1008 pixels)."""


@dataclass(frozen=True)
class Capabilities:
    """The declaration of a model. The defaults are those of SAM 2 and SAM 3 with memory modules."""

    following: Following = "memories"
    slots: int = 1
    """objects that share a row: a memory, a read and a run of the mask decoder"""
    has_prompt_features: bool = False
    """prompts are decoded on feature maps of their own"""
    ages_conditioning: bool = False
    """a conditioning frame has the temporal encoding of its age, until it is older than all others"""
    keeps_old_pointers: bool = True
    """pointers of conditioning frames are attended to when their memories no longer are"""
    usual_rows: int = USUAL_OBJECTS
    """number of rows of a call that a plan is tuned for"""
    rows_a_call: Mapping[str, int] = field(default_factory=lambda: ROWS_A_CALL)
    """largest number of rows of a call of an engine, by stage, where there is one"""

    @property
    def has_memory(self) -> bool:
        """True if the weights have memory modules. Without them, objects are followed by their last masks."""
        return self.following != "last masks"

    @property
    def shared(self) -> tuple[int, ...]:
        """The axis of the objects of one row in the tensors of decoder and memory encoder; none for a single object."""
        return (self.slots,) if self.following == "group memories" else ()

    @property
    def needs_warm_up(self) -> bool:
        """True if the first frames may wait for kernels, plans or graphs: those of memory attention take longest."""
        return self.has_memory

    def limit_rows(self, stage: str, most: int) -> int:
        """Return the largest number of rows of a call of an engine of this stage; it is at most `most`."""
        return min(most, self.rows_a_call.get(stage, most))

    def plan_rows(self, objects: int, most: int) -> int:
        """Return how many rows plans have to take for this number of objects, or `most` where it does not depend."""
        return most if self.shared else objects

    def why_not_engines(self) -> str | None:
        """Return why no engine can be built or compared, in words that follow the weights' name; None if it can."""
        if self.has_memory:
            return None
        return "has no memory modules: expected weights that have them for engines"

    def why_not_kernels(self) -> str | None:
        """Return why our kernels have nothing to compute; None if they have."""
        return None if self.has_memory else "has no memory read, which the kernels compute"

    def why_not_crops(self) -> str | None:
        """Return why objects cannot be followed in windows of the frame; None if they can."""
        if not self.has_memory:
            return "has no memory, by which a window would know its object"
        if self.shared:
            return "keeps one memory for many objects, and a window shows one of them"
        return None

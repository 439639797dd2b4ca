"""Observations for policies: the masks of a node in the form that GR00T, openpi, lerobot and gymnasium take.

It needs the core of the package only. `lerobot_step` and `gymnasium_wrapper` are imported on their own: they need the
package that they are for.
"""

from .policies import (
    as_gr00t,
    as_lerobot,
    as_openpi,
    lerobot_features,
    pack_gr00t,
    pack_openpi,
    unpack_gr00t,
    unpack_openpi,
)
from .slots import ANY, FIELDS, MAX_AGE_S, Fit, ObjectSlots, SlotObservation

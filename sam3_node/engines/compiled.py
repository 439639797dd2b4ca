"""Where torch.compile keeps what it has made, so that a restart finds it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger(__name__)


def keep_compiled(folder: Path) -> None:
    """Keep what torch.compile makes in `folder`/compiled; to be called before anything is compiled.

    Where the environment already names a place, that one stays; where the folder cannot be written, torch's own, which
    a reboot empties, with a warning.
    """
    if CACHE in os.environ:
        return
    kept = folder.expanduser().absolute() / "compiled"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled stages are not kept: cannot write %s: %s", kept, error.strerror)
        return
    os.environ[CACHE] = str(kept)

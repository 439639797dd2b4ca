"""Where torch.compile keeps what it has made, so that a restart finds it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

CACHE = "TORCHINDUCTOR_CACHE_DIR"
_log = logging.getLogger(__name__)


def keep_compiled(folder: Path) -> None:
    """Keep what torch.compile makes in `folder`/compiled; to be called before anything is compiled.

    Where the environment already names a place, that one stays; where the folder cannot be written, torch's own, which
    a reboot empties, with a warning.
    """
    if (
        os.environ.get(CACHE, default_cache_dir()) != default_cache_dir()
    ):  # torch sets its own when it is imported
        return
    kept = folder.expanduser().absolute() / "compiled"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("compiled stages are not kept: cannot write %s: %s", kept, error.strerror)
        return
    os.environ[CACHE] = str(kept)

"""Entry point of launch/start: `python -m sam3_node.processes PROFILE.toml`. Ctrl-C is quiet from its first line on."""

import os
import signal
import sys

# before all other imports, which take a part of a second: there is nothing to close yet
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

try:
    from .supervisor import main
except ModuleNotFoundError as error:
    from ..errors import explain_missing

    missing = explain_missing(error)
    if missing is None:
        raise
    print("launch/start: error:", missing, file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())

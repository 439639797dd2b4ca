"""Command-line entry point for replay in a checkout: `sam3-node replay` with the same options.

python tools/replay.py BAG… -o OUT
"""

import sys

from sam3_node.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))

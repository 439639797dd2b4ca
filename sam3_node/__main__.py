"""`python -m sam3_node` is `sam3-node`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())

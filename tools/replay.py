import sys

from sam3_node.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))

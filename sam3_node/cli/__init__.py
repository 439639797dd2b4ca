"""The command line of sam3-node: argument parsing, commands and their output."""

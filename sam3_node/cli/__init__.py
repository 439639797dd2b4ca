"""Command line: parsing, commands, and what they print."""

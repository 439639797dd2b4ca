"""The values that cross a border of the program, each written once: operations with their replies, messages, state.

A field carries its type, bounds and unit, and one line of meaning. Wire, client, console, tools for agents and tables
of the documentation read them from here.
"""

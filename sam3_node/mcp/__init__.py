"""Tools for agents: what the node tracks, its pictures and points, over the Model Context Protocol.

`arguments` has one class for each tool, `tools` carries them out, `server` speaks the protocol by the official SDK.
"""

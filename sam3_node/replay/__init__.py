"""Recordings through the same pipeline as the node's, without sockets: as the node did it, or every frame."""

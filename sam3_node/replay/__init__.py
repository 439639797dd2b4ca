"""Replay of recordings through the node's pipeline without sockets: as the node ran, or on every frame."""

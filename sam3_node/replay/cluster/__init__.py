"""Many recordings on many workers of a Ray cluster, or of this machine."""

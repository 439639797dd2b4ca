"""Recorder process: writes what cameras and node publish into MCAP files."""

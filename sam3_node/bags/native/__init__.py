"""Recording format of this package: its layout, writer and reader."""

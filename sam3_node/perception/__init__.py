"""The frame step without sockets: model, detector, and one pipeline for each camera."""

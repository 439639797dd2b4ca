"""Frame step without sockets: model, detector and one pipeline per camera."""

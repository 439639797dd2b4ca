"""Camera sources (scenes, recordings, video files, webcams), and the process that publishes their frames."""

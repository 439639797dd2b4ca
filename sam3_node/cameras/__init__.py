"""Where frames come from: scenes, recordings, video files and webcams, and the process that publishes them."""

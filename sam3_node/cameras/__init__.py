"""Where frames come from: drawn scenes, video files and webcams, and the process that publishes them."""

"""What can be picked next: the view of the things on a frame, what covers them, grips, and the scene for planners."""

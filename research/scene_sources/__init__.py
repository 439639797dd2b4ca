"""Further sources of rendered scenes: meshes of robosuite, and photographs as surfaces."""

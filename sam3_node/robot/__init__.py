"""The robot's own body: its URDF, meshes and joints, and its pixels in an image. No torch."""

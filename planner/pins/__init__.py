"""What the user fixed: read, checked, and as splits."""

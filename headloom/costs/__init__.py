"""Floor 5: what a mechanism costs, counted from the built module."""

"""Floor 4: what a mechanism costs, measured from the built module, and how fast it is."""

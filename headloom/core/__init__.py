"""Errors, registries, configs, files and locks: what every part uses and what knows nothing of attention."""

"""Errors, registries, configs, files, locks. Nothing of attention."""

"""Floor 0: errors, registries, configs. Imports nothing but the standard library."""

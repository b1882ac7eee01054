"""Masks, positions, scores, mixing, the cache. Needs torch alone."""

"""Floor 1: masks, positions, scores, mixing, the cache. Needs torch alone."""

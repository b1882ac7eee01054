"""Floor 5: the laboratory. Variants, equal budgets, runs that resume, statistics; `lab.compare.compare` is its door."""

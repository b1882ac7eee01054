"""The laboratory: studies, equal budgets, runs that resume, statistics. `lab.compare.compare` is its door."""

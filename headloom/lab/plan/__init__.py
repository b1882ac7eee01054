"""What will be run: equal budgets, fairness, step times."""

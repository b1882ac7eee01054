"""Making such models: grafted, built, folded back."""

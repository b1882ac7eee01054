"""What is asked: studies, variants and sizes as people write them, and resolved."""

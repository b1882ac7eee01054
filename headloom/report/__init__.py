"""Figures, tables and the HTML page, from the records of a study. Never imports torch."""

"""What came of it: statistics, verdicts, remarks."""

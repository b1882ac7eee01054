"""The `headloom` command: one file per subcommand. torch is imported only by commands that need it."""

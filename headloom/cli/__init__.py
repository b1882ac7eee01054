"""The `headloom` command, one file a subcommand. torch is imported only by a command that needs it."""

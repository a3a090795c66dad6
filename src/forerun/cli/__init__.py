"""The `forerun` command: one file a sub-command, each imported when it is called."""

"""The command line: a file per command, and shared options and helpers."""

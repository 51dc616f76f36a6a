"""The ``forethought`` command: a table of subcommands, each in its own file."""

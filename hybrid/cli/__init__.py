"""The command line: `main` finds the command, `commands` parse, call and print."""

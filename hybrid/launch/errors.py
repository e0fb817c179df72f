"""What goes wrong with starting a run on its hosts, for people."""


class LaunchError(ValueError):
    """Nothing was started; the message names the file, line, option or host, and what is allowed."""

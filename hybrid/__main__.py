"""`python -m hybrid`, which launchers start as `--module hybrid`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

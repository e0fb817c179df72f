"""`python -m hybrid`, which launchers start as `--module hybrid`."""

import sys

from hybrid.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

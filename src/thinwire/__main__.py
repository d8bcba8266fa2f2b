"""``python -m thinwire``."""

from __future__ import annotations

import sys

from thinwire.cli import main

if __name__ == "__main__":
    sys.exit(main())

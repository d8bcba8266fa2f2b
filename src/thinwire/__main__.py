"""``python -m thinwire``."""

import sys

if __name__ == "__main__":
    try:
        from thinwire.cli import main
    except KeyboardInterrupt:
        print("thinwire: stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(main())

"""`python -m qwenc …`."""

import sys

if __name__ == "__main__":
    try:
        from qwenc.commands.main import main

        main()
    except KeyboardInterrupt:  # while that was imported
        sys.exit(130)

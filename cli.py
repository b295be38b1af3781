"""`python cli.py …` from a checkout, from any working directory: the same command as the installed `qwenc`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

if __name__ == "__main__":
    try:
        from qwenc.commands.main import main

        main()
    except KeyboardInterrupt:  # while that was imported
        sys.exit(130)

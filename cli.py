"""`python cli.py …` from a checkout, from any working directory: the same command as the installed `qwenc`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

if __name__ == "__main__":
    from qwenc.commands.main import main

    main()

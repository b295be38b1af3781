"""The console script. It imports nothing before Ctrl-C is looked after: a start that is interrupted ends as silently as a run."""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Runs the command line of the process and ends the process."""
    try:
        from qwenc.commands.dispatch import flush, run_command

        code = run_command(sys.argv[1:])
        flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    # not sys.exit: taking the interpreter down module by module costs a quarter of a second, while the shell waits
    os._exit(code)

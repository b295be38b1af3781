"""`python -m qwenc …`."""

from qwenc.commands.main import main

if __name__ == "__main__":
    main()

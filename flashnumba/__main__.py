"""``python -m flashnumba`` is the command ``flashnumba``."""

from flashnumba.cli import main

if __name__ == "__main__":
    main()

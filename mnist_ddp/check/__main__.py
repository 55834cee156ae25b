"""`python -m mnist_ddp.check`. What runs is in command.py: processes that it spawns do not import this file."""

import sys

from mnist_ddp.check.command import main
from mnist_ddp.errors import exit_with_one_line

if __name__ == "__main__":
    with exit_with_one_line():
        sys.exit(main())

"""``python -m bmtrain`` is the ``bmtrain`` command."""

import sys

from bmtrain.command import main

if __name__ == "__main__":
    sys.exit(main())

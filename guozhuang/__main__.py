"""Let ``python -m guozhuang`` run the command ``guozhuang``."""

import sys

from guozhuang.cli import main

sys.exit(main())

"""``python -m guozhuang``."""

import sys

from guozhuang.cli import main

sys.exit(main())

"""Read when Python starts (guozhuang_bagua.pth): puts the folder that holds the package ``bagua`` alone on the path.

It stands right before site-packages, so nothing that is installed there is overwritten: where Bagua itself is, that package
finds it behind itself, and hands over to it.
"""

import os
import sys

_SITE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.path.join(_SITE, "guozhuang_bagua")

if _FOLDER not in sys.path:
    sys.path.insert(sys.path.index(_SITE) if _SITE in sys.path else len(sys.path), _FOLDER)


def baguarun() -> None:
    """Be the command ``baguarun``: Guozhuang's."""
    from guozhuang.compat.bagua.script.baguarun import main

    sys.exit(main())

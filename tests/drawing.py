"""How many examples a property is tried with: few in `make test`, the same ones each time; many with the slow tests.

@examples(200)
@given(...)
def test_...
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from hypothesis import settings

# Set by `make test-slow`, whose shards have the properties too.
MANY = os.environ.get("EXAMPLES") == "many"
_SHARE = 5

# No deadline: it would say how fast a machine is.
_NO_DEADLINE: timedelta | None = None
settings.register_profile("few", max_examples=20, derandomize=True, deadline=_NO_DEADLINE)
settings.register_profile("many", max_examples=100, deadline=_NO_DEADLINE)
settings.load_profile("many" if MANY else "few")


def examples(most: int = 100) -> Any:
    """A decorator for a property: ``most`` examples, or a fifth of them."""
    return settings(max_examples=most if MANY else max(most // _SHARE, 10))

"""The C parts of the shared-memory group: its engine, and sums over pages of zeros. All else stands in pyproject.toml.

They are optional: without a compiler, or where it does not compile, the package installs all the same and its twins in Python
do the work.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("guozhuang/groups/shared_memory")
# No contraction: a product and a sum must round as they do in the twin. Nobody reads floating-point exception flags,
# and without them more loops become vectors. Names stay inside the library.
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden"]


def extension(name: str, sources: tuple[str, ...], headers: tuple[str, ...]) -> Extension:
    """Describe one module."""
    return Extension(
        f"guozhuang.groups.shared_memory.{name}",
        sources=[str(SOURCES / source) for source in sources],
        depends=[str(SOURCES / header) for header in headers],
        extra_compile_args=FLAGS,
        optional=True,
    )


EXTENSIONS = [
    extension(
        "_engine",
        ("_engine.c", "_program.c", "_barrier.c", "_reduce.c"),
        ("_program.h", "_barrier.h", "_reduce.h"),
    ),
    extension("_sparse", ("_sparse.c", "_reduce.c"), ("_reduce.h",)),
]

setup(ext_modules=EXTENSIONS if sys.platform.startswith("linux") else [])

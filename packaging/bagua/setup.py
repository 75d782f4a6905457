"""All else stands in pyproject.toml, which has no word for a file that belongs beside the packages."""

import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

(PATH_FILE,) = (path.name for path in Path(__file__).parent.glob("*.pth"))


class BuildWithPathFile(build_py):
    """Puts the file that Python reads at its start into site-packages."""

    def run(self) -> None:
        super().run()
        self.copy_file(PATH_FILE, str(Path(self.build_lib, PATH_FILE)), preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib, PATH_FILE))]


# Whoever installs the extra builds this in a clone of the repository: nothing is left there, nor comes in from an old build.
with tempfile.TemporaryDirectory() as folder:
    setup(
        cmdclass={"build_py": BuildWithPathFile},
        options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}},
    )

"""Builds the wheel. The CUDA sources live in ``cuda_src`` beside the package and travel as ``pykern/cuda_src``.

An editable install and ``PYTHONPATH=.`` see the checkout, where the sources are found beside the package.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SUFFIXES = {".cuh", ".cu", ".h", ".hpp", ".cpp", ".inc", ".S", ".json", ".md"}


class BuildWithSources(build_py):
    """``build_py`` that also copies ``cuda_src`` into the package."""

    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):
            return
        source = Path(__file__).resolve().parent / "cuda_src"
        target = Path(self.build_lib) / "pykern" / "cuda_src"
        shutil.rmtree(
            target, ignore_errors=True
        )  # a file deleted from the checkout must not live on in the wheel
        for path in sorted(source.rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


setup(cmdclass={"build_py": BuildWithSources})

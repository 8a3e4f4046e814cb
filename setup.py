"""The page that package indexes show, README.md with links to the repository that pyproject.toml
names; and the kernels of `native/`, which are left out where they cannot be compiled. All else is
in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def page() -> str:
    """README.md with absolute links: those of this repository are relative in it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({PROJECT['urls']['Source']}/", text)


def kernels() -> list[Extension]:
    """An extension for each kernel. Without Cython or numpy there are none; one that does not
    compile is passed over."""
    try:
        import numpy
        from Cython.Build import cythonize
    except ImportError:
        return []
    extensions = [
        Extension(
            f"twinserve.native.{path.stem}",
            [path.as_posix()],
            include_dirs=[numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            # a fused multiply-add rounds once where numpy rounds twice
            extra_compile_args=["-O2", "-ffp-contract=off"],
        )
        for path in sorted(Path("src/twinserve/native").glob("*.pyx"))
    ]
    made = cythonize(extensions, include_path=["src"], build_dir="build/cython")
    for extension in made:
        extension.optional = True  # cythonize forgets it
    return made


setup(long_description=page(), long_description_content_type="text/markdown", ext_modules=kernels())

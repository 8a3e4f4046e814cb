"""The page that package indexes show: README.md, whose links go to the repository that
pyproject.toml names. All else is in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def page() -> str:
    """README.md with absolute links: those of this repository are relative in it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({PROJECT['urls']['Source']}/", text)


setup(long_description=page(), long_description_content_type="text/markdown")

"""One package for every tool: what is installed is what lies in the folders, and a copy without its
links says what is wrong."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "twinserve"
FOLDERS = ("backends", "experiments", "native", "policies", "profiles", "sim", "traces")


def test_the_package_is_made_of_links_to_the_folders():
    links = {path.name: path for path in PACKAGE.iterdir() if path.is_symlink()}
    assert sorted(links) == sorted(FOLDERS)
    assert all(path.resolve() == ROOT / name for name, path in links.items())
    assert (PACKAGE / "py.typed").is_file()


def test_every_folder_with_code_is_a_package():
    """Packages are found, not listed: one without an __init__.py would be left out silently."""
    folders = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_copy_without_its_links_says_so(tmp_path):
    """As git makes it where links are switched off: small files that hold the link's target."""
    copy = tmp_path / "twinserve"
    copy.mkdir()
    shutil.copy(PACKAGE / "__init__.py", copy)
    for name in FOLDERS:
        (copy / name).write_text(f"../../{name}")
    command = [sys.executable, "-c", "import twinserve"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (said,) = [line for line in run.stderr.splitlines() if line.startswith("ImportError")]
    assert run.returncode == 1
    assert "sim" in said and "links" in said and "core.symlinks" in said


def tracked() -> list[str]:
    """Files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Made from a copy of what is tracked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), "."]
    subprocess.run(build, cwd=source, check=True)
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.mark.slow
def test_a_wheel_made_from_the_sources_holds_every_module_and_file(wheel):
    packed = set(wheel.namelist())
    wanted = {f"twinserve/{name}" for name in tracked() if name.partition("/")[0] in FOLDERS}
    assert wanted | {"twinserve/py.typed", "twinserve/formats.py"} <= packed


@pytest.mark.slow
def test_the_page_of_an_index_has_links_that_work_there(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    head, _, page = wheel.read(name).decode().partition("\n\n")
    for line in (
        "License-Expression: Apache-2.0",
        "Description-Content-Type: text/markdown",
        "Author: the twinserve contributors",
    ):
        assert line in head
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 5 and all(link.startswith(("https://", "#")) for link in links)
    assert any("plot.png" in link for link in links)
    packed = {n.rsplit("/", 1)[-1] for n in wheel.namelist() if "/licenses/" in n}
    assert packed == {"LICENSE", "NOTICE"}

"""Notebooks, executed from top to bottom as a reader would, and what they show.

`python -m tests.notebooks.books NAME...` executes them and stores what they show; all of them
without a name (simulated_against_live needs vLLM).
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
LONGEST_S = 600
# Of this machine's clock, and of places in memory.
_OURS = re.compile(r"(?s)<tr>(?:(?!</tr>).)*?(?:wall time|simulated steps/s).*?</tr>")
_LINES = re.compile(r"(?m)^.*(?:wall time|simulated steps/s).*\n?")


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(book: nbformat.NotebookNode, folder: str | os.PathLike) -> nbformat.NotebookNode:
    """The same with what its cells show now, run in `folder`, with the commands beside this
    interpreter."""
    from nbclient import NotebookClient  # half a second to import

    where = {"metadata": {"path": str(folder)}}
    scripts = Path(sys.executable).parent
    path = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return NotebookClient(book, timeout=LONGEST_S, resources=where).execute(env=path)


def shown(book: nbformat.NotebookNode) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Of each code cell its first line, and (kind, text) of all that it shows; a picture is its
    kind. Without what another machine's clock would change."""
    for cell in book.cells:
        if cell.cell_type == "code":
            found = []
            for output in cell.outputs:
                if output.output_type == "stream":
                    found.append((output.name, _LINES.sub("", output.text)))
                for kind, text in sorted(output.get("data", {}).items()):
                    found.append((kind, text if kind.startswith("text/") else ""))
            cleaned = [(k, _OURS.sub("", t) if k == "text/html" else t) for k, t in found]
            yield cell.source.partition("\n")[0], cleaned


def refresh(name: str) -> None:
    book = read(name)
    with tempfile.TemporaryDirectory() as folder:
        executed(book, folder)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it was
    nbformat.write(book, FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or NAMES:
        refresh(wanted)

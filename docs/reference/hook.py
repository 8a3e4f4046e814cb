"""Pages of the site that are made from the code when it is built (`hooks` of mkdocs.yml). No copy
of them is stored, so none can be stale; tests/test_reference.py says what they must hold."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[str, str]:
    """Path in the site's sources -> Markdown."""
    if str(ROOT) not in sys.path:  # mkdocs loads this file alone
        sys.path.insert(0, str(ROOT))
    from docs.reference import commands, files, python

    return {
        "reference/commands.md": commands.page(),
        "reference/files.md": files.page(),
        "reference/python.md": python.page(python.USERS),
        "reference/contracts.md": python.page(python.CONTRACTS),
        **tables(),
    }


def tables() -> dict[str, str]:
    """All tables of each study, or its claims of a paper, from the files that it keeps."""
    from twinserve.experiments.study.command import STUDIES
    from twinserve.experiments.study.study import Study

    found = {}
    for folder in sorted((ROOT / "docs" / "results").iterdir()):
        if folder.name in STUDIES:
            study = import_module(f"twinserve.experiments.{folder.name}.main").STUDY
            if isinstance(study, Study):
                text = study.markdown(folder) if study.paper else study.tables(folder)
                found[f"results/{folder.name}/{study.report}"] = text
    return found


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs, with the files that it found."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files

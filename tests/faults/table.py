"""The table: one YAML file of faults for each room."""

import ast
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import yaml

TABLE = Path(__file__).parent
OPEN = TABLE / "open.yaml"  # faults that no test catches yet
ROOT = TABLE.parents[1]
LIVE = ("tests/live/", "tests/identity/")  # tests that need vLLM


@dataclass
class Fault:
    """One edit of one source file.

    file       path from the root of the repository
    edits      (old, new) pairs; each `old` occurs exactly once in the file
    caught_by  ids of tests: at least one of them fails with the edit
    why        instead of `caught_by`: why the edit changes nothing that a user can see
    """

    name: str
    file: str
    edits: list[list[str]]
    caught_by: list[str] = field(default_factory=list)
    why: str = ""

    @property
    def live(self) -> bool:
        return bool(self.caught_by) and all(test.startswith(LIVE) for test in self.caught_by)

    def applied(self, root: Path) -> str:
        """Return the edited text of the file. Raises ValueError if an `old` is not there once."""
        text = (root / self.file).read_text(encoding="utf-8")
        for old, new in self.edits:
            if (count := text.count(old)) != 1:
                raise ValueError(f"{self.file} has {count} copies of {old!r}, not one")
            text = text.replace(old, new)
        return text

    def stale(self, open_: bool) -> str:
        """Return what of this fault no longer matches the repository; empty if all does. open_: it
        has no tests yet."""
        try:
            ast.parse(self.applied(ROOT))
        except (OSError, SyntaxError, ValueError) as error:
            return str(error)
        if bool(self.caught_by) == bool(self.why) and not open_:
            return "has neither tests nor a reason why it changes nothing, or both"
        missing = [test for test in self.caught_by if not _is_there(test)]
        return f"no test {missing[0]}" if missing else ""


def _is_there(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    try:
        return {*names} <= _names(file)
    except OSError:
        return False


@cache
def _names(file: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, kinds)}


def read() -> dict[Path, list[Fault]]:
    """Return the faults by file of the table. Raises ValueError if two have the same name."""
    table, known = {}, {field.name for field in fields(Fault)}
    for path in sorted(TABLE.glob("*.yaml")):
        table[path] = []
        for row in yaml.safe_load(path.read_text(encoding="utf-8")):
            if not row.keys() <= known:
                raise ValueError(f"{path.name}: {row.keys() - known} is no field of a fault")
            table[path].append(Fault(**row))
    names = [fault.name for faults in table.values() for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several faults have the name {sorted(twice)}")
    return table


def write(path: Path, faults: list[Fault]) -> None:
    rows = [{k: v for k, v in vars(fault).items() if v} for fault in faults]
    text = yaml.dump(rows, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(text.replace("\n- name:", "\n\n- name:"), encoding="utf-8")


class _Dumper(yaml.SafeDumper):
    """Text of several lines stays several lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)

"""The table of docs/invariants.md, from what tests.identity.engines has written:

python -m tests.identity.engines_table docs/results/engines
"""

import json
import sys
from pathlib import Path


def read_results(folder: Path) -> list[dict]:
    """One for each release, the newest first."""
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sorted(found, key=lambda one: [int(n) for n in one["vllm"].split(".")], reverse=True)


def table(results: list[dict]) -> str:
    """Markdown: a row for each release."""
    lines = [
        "| vLLM | its own rules (`release=`) | 0.32's rules | locked replay | serving in process |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        own = _same(one["identity"]) + f" (`{one['release']}`)"
        newest = _same(one["as_newest"]) if "as_newest" in one else "these are its own"
        replay, serving = _tests(one, "replay", "engine"), _tests(one, "serving", "serving")
        lines.append(f"| {one['vllm']} | {own} | {newest} | {replay} | {serving} |")
    return "\n".join(lines)


def _same(found: dict) -> str:
    parted = sum(len(steps) for steps in found["parted"].values())
    if not parted:
        return f"{found['runs']} runs, {found['steps']:,} steps: none differs"
    return f"{parted} of {found['runs']} runs part"


def _tests(one: dict, name: str, use: str) -> str:
    lacks = one["missing"][use]
    if lacks:
        return f"lacks `{lacks[0].rpartition('.')[2]}`"
    if name not in one:
        return "not run"
    found = one[name]
    return f"{found['passed']} passed" + (f", {found['failed']} failed" if found["failed"] else "")


if __name__ == "__main__":
    print(table(read_results(Path(sys.argv[1]))))

"""Draws docs/rooms.svg: the rooms of docs/architecture.md, and which imports which. From the
repository's root: python -m docs.reference.rooms

A room stands above all rooms that it imports when it is loaded. An arrow that follows from two
others is left out.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("traces", "profiles", "native", "policies", "backends", "sim", "experiments")
SYSTEMS = ("baselines", "bros", "echo", "justitia", "layerkv")
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 44, 24, 34  # pixels
TEXTS = {
    "traces": "workloads: readers, generators",
    "profiles": "step times, memory of hardware",
    "native": "compiled loops",
    "policies": "contract, ledgers, shared parts",
    "policies/*": "vLLM, BROS, Echo, Justitia, LayerKV",
    "backends": "what executes a plan",
    "backends/live": "vLLM: in process, served, routed",
    "sim/results": "rows, metrics, files",
    "sim/engine": "loop and clock of a replica",
    "sim/report": "tables, pages, charts",
    "sim/fleet": "replicas, routers, failures",
    "sim/serve_line": "servers in vLLM's words",
    "sim/setup": "settings, one run",
    "sim/plan": "which GPUs, how many",
    "sim/sweep": "many runs",
    "sim/twin": "simulated and live, compared",
    "sim/cli": "commands",
    "sim/api": "import twinserve",
    "experiments": "a study each",
}


def room_of(module: str) -> str:
    """The room of a dotted name, without `twinserve.`; what several rooms share is one of them."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    if first == "policies":
        return "policies/*" if second in SYSTEMS else "policies"
    if first == "sim" or (first, second) == ("backends", "live"):
        return f"{first}/{second}"
    return first


def imports() -> dict[str, set[str]]:
    """Room -> rooms that its modules import at their top level."""
    found: dict[str, set[str]] = {room: set() for room in TEXTS}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if module == "sim.__init__":
                continue
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                    "twinserve."
                ):
                    other = room_of(node.module.removeprefix("twinserve."))
                    if other in TEXTS and other != room_of(module):
                        found[room_of(module)].add(other)
    return found


def levels(below: dict[str, set[str]]) -> dict[str, int]:
    """Room -> how many rooms lie under it, one on another."""
    done: dict[str, int] = {}

    def level(room: str) -> int:
        if room not in done:
            done[room] = max((level(other) + 1 for other in sorted(below[room])), default=0)
        return done[room]

    for room in below:
        level(room)
    return done


def reduced(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that follow from others."""

    def reach(room: str) -> set[str]:
        return below[room].union(*(reach(other) for other in below[room]))

    return {
        room: {one for one in others if not any(one in reach(x) for x in others - {one})}
        for room, others in below.items()
    }


def picture() -> str:
    """The SVG."""
    below = imports()
    level = levels(below)
    rows = [[r for r in TEXTS if level[r] == n] for n in range(max(level.values()), -1, -1)]
    wide = max(map(len, rows)) * (WIDTH + GAP_X) + GAP_X
    high = len(rows) * (HEIGHT + GAP_Y) + GAP_Y
    place = {
        room: (
            (wide - len(row) * (WIDTH + GAP_X) + GAP_X) // 2 + i * (WIDTH + GAP_X),
            GAP_Y + n * (HEIGHT + GAP_Y),
        )
        for n, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="sans-serif" text-anchor="middle">',
        '<marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker>',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
    ]
    for room, others in reduced(below).items():
        for other in sorted(others):
            (x, y), (to_x, to_y) = place[room], place[other]
            parts.append(
                f'<path d="M{x + WIDTH // 2} {y + HEIGHT}C{x + WIDTH // 2} {y + HEIGHT + GAP_Y} '
                f'{to_x + WIDTH // 2} {to_y - GAP_Y} {to_x + WIDTH // 2} {to_y}" fill="none" '
                'stroke="#667" marker-end="url(#a)"/>'
            )
    for room, (x, y) in place.items():
        middle = x + WIDTH // 2
        parts += [
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#eef2f7" '
            'stroke="#446"/>',
            f'<text x="{middle}" y="{y + 19}" font-size="13" font-weight="bold">{room}</text>',
            f'<text x="{middle}" y="{y + 35}" font-size="10.5">{TEXTS[room]}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    (ROOT / "docs" / "rooms.svg").write_text(picture(), encoding="utf-8")

"""Pages of help: docstrings as plain text. A Markdown renderer would take a fifth of a page's
time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


class Pages:
    """Cyclopts' help formatter, with lines broken at the terminal's width instead of the
    source's."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from cyclopts.help import DefaultFormatter

        for entry in panel.entries:
            _flow(entry.description)
        DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(self, console: Console, options: ConsoleOptions, said: Any) -> None:
        from cyclopts.help import DefaultFormatter

        _flow(said)
        DefaultFormatter().render_description(console, options, said)


def _flow(said: Any) -> None:
    """A docstring's text, in place: one line a paragraph."""
    from rich.text import Text

    text = getattr(said, "primary_renderable", None)
    if isinstance(text, Text):
        paragraphs = re.split(r"\n\s*\n", text.plain)
        text.plain = "\n\n".join(map(_one_line, paragraphs))


def _one_line(paragraph: str) -> str:
    """Commands of an example keep theirs."""
    lines = [line.strip() for line in paragraph.strip().splitlines()]
    if all(line.startswith("$ ") for line in lines):
        return "\n".join(lines)
    return " ".join(paragraph.split())

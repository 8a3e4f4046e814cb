"""Colours, dashes and marks of curves. Each colour has a contrast of three and more on the light
and the dark background of a page, so that a curve keeps its colour. Dashes and marks distinguish
curves in grey print."""

COLOURS = (
    *("#2f7ed0", "#d9642a", "#2f9a5e", "#9a63cf"),
    *("#a8801a", "#1f96a5", "#d0507a", "#7b8391"),
)
INK = "#7b8391"  # axes and marks of charts, before a page says otherwise
GREY = "#5b6470"
LIGHT, DARK = "#ffffff", "#14181d"
DASHES = ("solid", "dashed", "dotted")
MARKS = ("circle", "square", "diamond", "triangle", "inverted_triangle")  # as Bokeh calls them


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> str:
    return DASHES[number % len(DASHES)]


def marked(number: int) -> int:
    """Its place in MARKS."""
    return number % len(MARKS)


def width(number: int, of: int) -> float:
    """Of a curve: later ones are thinner, so that one which lies on another leaves it visible."""
    return 1.4 + 1.6 * max(of - 1 - number, 0) / max(of - 1, 1)

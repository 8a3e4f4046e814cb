"""Colours of curves and of what is written. Each has a contrast of three and more on the light
background of a page and on the dark one, so that a curve keeps its colour in both."""

COLOURS = (
    *("#2f7ed0", "#d9642a", "#2f9a5e", "#9a63cf"),
    *("#a8801a", "#1f96a5", "#d0507a", "#7b8391"),
)
INK = "#7b8391"  # axes and marks of charts, before a page says otherwise
LIGHT, DARK = "#ffffff", "#14181d"

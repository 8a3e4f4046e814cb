"""Pages are Markdown; reference/ makes some of them from the code."""

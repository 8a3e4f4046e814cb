"""Paged attention over KV blocks that two requests may share, one filling each from either end."""

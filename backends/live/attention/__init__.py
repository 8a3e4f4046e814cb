"""Attention over KV blocks that two requests share from both ends."""

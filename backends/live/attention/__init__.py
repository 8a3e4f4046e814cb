"""Paged attention over KV blocks that two requests may share: one fills a block's slots from the
left, one from the right."""

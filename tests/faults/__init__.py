"""Seeded faults: edits of the sources, each with the tests that catch it."""

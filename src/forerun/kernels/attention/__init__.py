"""Attention over ragged rows, and the writes to the cache it reads."""

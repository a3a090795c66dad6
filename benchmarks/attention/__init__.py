"""Attention over ragged rows on a GPU: what a call costs, form by form, against masked SDPA."""

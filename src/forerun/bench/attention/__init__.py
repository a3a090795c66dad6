"""Attention over ragged rows on a GPU: what each form costs, against the library's masked attention."""

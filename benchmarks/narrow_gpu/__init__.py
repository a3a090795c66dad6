"""Narrow weights on a GPU: steps, prompts and drafts of one pair of models in each scheme."""

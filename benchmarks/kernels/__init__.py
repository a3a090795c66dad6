"""Verification on a GPU, from logits to tokens: what a call costs, beside its floor and transformers."""

"""Verification and draft sampling, from logits to tokens."""

"""Making drafters: text written by the target, and what learns from it."""

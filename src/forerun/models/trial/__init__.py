"""A model's own forward beside ours, on a few ragged rows."""

"""Key/value rows that can be cut back."""

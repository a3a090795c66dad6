"""Products of a few rows with large weights, and the norms between them."""

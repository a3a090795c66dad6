"""Where top-k, top-p and min-p cut a row of logits, found without sorting it."""

"""What speculation will gain on this machine with these prompts: measured, predicted, and checked by running it."""

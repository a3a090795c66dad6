"""Steps of a few tokens on a CPU: what they cost, beside transformers and what the hardware allows."""

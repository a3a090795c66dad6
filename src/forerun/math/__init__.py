"""Pure mathematics of speculative decoding. Randomness comes in as arguments or as counter keys."""

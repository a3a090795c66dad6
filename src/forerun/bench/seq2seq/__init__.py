"""Encoder-decoder models: decoding with drafts against decoding without, on pairs whose acceptance is dialled in."""

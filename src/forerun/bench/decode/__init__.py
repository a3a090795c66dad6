"""Whole rounds of a pair of models: what a token costs plainly and with drafts, and how near the hardware that is."""

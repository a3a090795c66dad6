"""Measurements: what is compared, how it is timed, and the records that keep the numbers."""

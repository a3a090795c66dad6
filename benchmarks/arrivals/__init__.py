"""Requests that come and go: how long each waits for its first token and for the following ones, under a given load."""

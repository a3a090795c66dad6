"""Prompts for the suite: ordinary text that repeats itself, so that every kind of drafter has something to say."""

from __future__ import annotations

PROMPTS = (
    "The three primary colours are red, yellow and blue. What are the three primary colours? The three primary",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,",
    "Once upon a time there was a fox who lived in a forest. One morning the fox",
)

OPEN = (
    "My sister likes music and my brother likes music and my mother likes",
    "The cat sat on the mat. The dog sat on the",
    "Monday was cold. Tuesday was cold. Wednesday was",
    "I went to the market and bought some apples. Then I went to the market and bought some",
)
"""Each ends with words it has used before, so that look-up drafts, and goes on in more than one way."""

"""What is there when a server begins stays until it ends."""

from __future__ import annotations

import gc


def leave_out() -> None:
    """Have garbage collection no longer look through it: of 400,000 objects that the libraries made, that takes a
    quarter of a second, in which no token is decoded or sent. Collected before, so that no garbage stays."""
    gc.collect()
    gc.freeze()

"""What garbage collection leaves out while a server runs, and what it does not."""

from __future__ import annotations

import gc
import weakref

from forerun.serve.apart.garbage import leave_out


class Ring:
    """Refers to itself, so that only garbage collection ends it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_there_is_left_out_and_what_comes_later_is_not() -> None:
    gc.disable()
    try:
        old, kept = weakref.ref(Ring()), Ring()
        leave_out()
        assert old() is None, "garbage is no part of it"
        assert gc.get_freeze_count() > 10_000 and not any(each is kept for each in gc.get_objects())
        late = weakref.ref(Ring())
        gc.collect()
        assert late() is None
    finally:
        gc.unfreeze()
        gc.enable()

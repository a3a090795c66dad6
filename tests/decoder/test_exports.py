"""Every name that `import forerun` promises is there."""

from __future__ import annotations

import pytest

import forerun


@pytest.mark.parametrize("name", forerun.__all__)
def test_every_exported_name_can_be_used(name: str) -> None:
    assert getattr(forerun, name) is not None


def test_a_name_that_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="Specolator"):
        _ = forerun.Specolator

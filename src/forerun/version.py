"""Forerun's version, kept here alone (the build reads it from this file), and those of other packages."""

from __future__ import annotations

__version__ = "0.1.0"


def installed_version(package: str) -> str | None:
    """None where the package is not installed."""
    import importlib.metadata  # `forerun --help` need not wait for it

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

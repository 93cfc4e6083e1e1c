"""bitsandbytes, imported only for its weights: it takes seconds, and its advice to install more is not for users."""

from __future__ import annotations

import logging
from typing import Any


def bitsandbytes() -> Any:
    """The package, with its warnings off. ImportError where it is not installed."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes as package

    return package

"""What the library tells about a conversion, left out where a recipe converts again and again."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def quiet() -> Generator[None]:
    """Keep the library from saying at every conversion what is not applied in training."""
    logger = logging.getLogger("hf_favorpp.convert")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

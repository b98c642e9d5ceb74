"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *places: int) -> list[Any]:
    """Parameters, of which those at other places are marked `thorough`.

    Args:
        values: of one argument; or tuples of several arguments.
        places: indices of the values that `make test` runs; negative ones count from the end.
    """
    every = list(values)
    kept = {range(len(every))[place] for place in places}
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if place in kept else pytest.mark.thorough,
        )
        for place, value in enumerate(every)
    ]

"""Constants of a family's cost model, kept as data in `costs.json` beside its `cost.py`."""

from __future__ import annotations

import functools
import json
from collections import namedtuple
from pathlib import Path
from typing import Any


@functools.cache
def load(module: str, variant: str = "") -> Any:
    """The constants of the folder of `module`, a file's path: each an attribute of its name.

    The file gives each constant `value`, `unit` and `origin`: the sweep it was fitted to, or set by
    hand from. `means` says in words what it is. A constant that is no physical quantity has
    `absorbs` instead: what the model leaves out and the constant makes up for. A value that is an
    object has one number for each variant of the model; `variant` picks it.
    """
    path = Path(module).with_name("costs.json")
    constants = json.loads(path.read_text(encoding="utf-8"))
    values = {name: constant["value"] for name, constant in constants.items()}
    return namedtuple("Costs", values)(
        *(value[variant] if isinstance(value, dict) else value for value in values.values())
    )

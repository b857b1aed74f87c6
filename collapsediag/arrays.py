"""numpy arrays and plain Python values of whatever trainers hold: lists, numpy, torch on any device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_numpy(values: Any) -> NDArray[Any]:
    """numpy array of numpy, list or torch input. A torch tensor on any device costs one transfer.

    Raises ValueError for what has no rectangular shape.

    >>> to_numpy([1, 2]).tolist()
    [1, 2]
    """
    if hasattr(values, "detach"):
        tensor = values.detach()
        # numpy has no bfloat16; float64 holds every torch float exactly.
        tensor = tensor.double() if tensor.is_floating_point() else tensor
        return np.asarray(tensor.cpu().numpy())
    if isinstance(values, (list, tuple)) and values and hasattr(values[0], "detach"):
        values = [to_numpy(value) for value in values]
    return np.asarray(values)


def plain(value: Any) -> Any:
    """The Python number inside a numpy scalar or a tensor of one element; anything else as it is.

    JSON knows no numpy and no torch, and equal tensors are not equal keys.

    >>> plain(np.float32(0.5)), plain("a"), plain(None)
    (0.5, 'a', None)
    """
    # A container is not a number: its `item` may be anything.
    if getattr(value, "shape", None) is None or not hasattr(value, "item"):
        return value
    return value.item() if value.shape == () or tuple(value.shape) == (1,) else value


def whole_number(value: Any) -> int | None:
    """The integer a number of any make stands for, None where it is none. A boolean is no number here.

    >>> whole_number(np.int32(4)), whole_number(4.0), whole_number("4"), whole_number(True), whole_number(None)
    (4, 4, None, None, None)
    """
    number = plain(value)
    if isinstance(number, bool) or not (isinstance(number, int) or (isinstance(number, float) and number.is_integer())):
        return None
    return int(number)

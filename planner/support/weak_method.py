"""Methods that do not keep their object. A search is hundreds of thousands of objects: where a part
of it held a method of the whole, nothing would go until the cycle collector has looked at each."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A method of an object that lives as long as the result is called."""
    known = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = known()
        assert alive is not None
        return alive(*args, **kwargs)

    return call

"""The type checker of the test run: beartype, but for functions whose hint it cannot read."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep673Exception

CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An int is a float."""


def checked(function: Callable) -> Callable:
    """Checks arguments and result at every call.

    A method that returns `Self` stays as it is: jaxtyping decorates methods one by one, and beartype wants the class.
    """
    try:
        return CHECK(function)
    except BeartypeDecorHintPep673Exception:
        return function

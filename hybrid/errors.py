"""Errors that name which value, what is wrong with it, where it stands and what to do about it.

Everything a user can cause is a `HybridError` (a `ValueError`): the command line prints its message alone and exits
with code 2. `assert` is left for what only this code can break.
"""

from torch import Tensor


class HybridError(ValueError):
    """Base of every error that a user's input can cause."""


class ConfigError(HybridError):
    """A setting is unknown, misspelt, of the wrong type or meaningless beside another one."""


class MissingMeasurement(HybridError):
    """A method asks for something that no teacher, verifier or record of the run provides."""


class DataError(HybridError):
    """A data set, a record file or a model folder is missing, empty or malformed."""


class RewardError(HybridError):
    """A reward function raised, or returned something that is not one number or None per completion."""


def check(ok: Tensor, value: Tensor, message: str) -> None:
    """Refuses a tensor that has a bad entry.

    Args:
      ok: True where `value` is fine; of the same shape.
      value: the tensor that is checked.
      message: what must hold, e.g. "share_BT must be finite and >= 0".

    Raises:
      HybridError: names the first bad index, its value and how many are bad.
    """
    if bool(ok.all()):
        return
    where = tuple((~ok).nonzero()[0].tolist())
    raise HybridError(f"{message}; got {float(value[where])} at index {where} ({int((~ok).sum())} bad of {ok.numel()})")

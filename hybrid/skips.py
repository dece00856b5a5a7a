"""Updates that are left out because their gradient is no number."""

import math

from hybrid.errors import HybridError


class Skips:
    """Counts the updates that were left out, and stops a run that makes no others.

    Attributes:
      total: of the run so far.
    """

    def __init__(self, limit: int) -> None:
        """`limit` of them in a row stop the run."""
        self.limit, self.total, self._in_a_row = limit, 0, 0

    def judge(self, step: int, norm: float, *, skipped: bool) -> bool:
        """Whether an update must be left out.

        Args:
          step: of the update, from 1.
          norm: of its gradient.
          skipped: the engine has left it out by itself.

        Raises:
          HybridError: it is the last of `limit` in a row.
        """
        if math.isfinite(norm) and not skipped:
            self._in_a_row = 0
            return False
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row == self.limit:
            raise HybridError(
                f"{self.limit} updates in a row, up to step {step}, had NaN or infinite gradients and were left out, "
                "so nothing is learned any more; look at the rollouts of these steps, lower student.lr, or go on from "
                "an earlier checkpoint with --resume"
            )
        return True

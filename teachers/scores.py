"""What a teacher answers.

Shape letters: B responses, T completion tokens (right-padded), K support, H hidden width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """One teacher's view of B completions; value t belongs to completion token t, in every tensor.

    Attributes:
      logprob_BT: log-prob in nats of the sampled token; 0 where `valid_BT` is False.
      valid_BT: True where `logprob_BT` holds a score: False on padding, in failed rows, on tokens that could not be
        aligned.
      temperature: the temperature that the distributions hold at.
      top_ids_BTK: ids of the support, in falling order of probability where the teacher chose it; -1 where a position
        has fewer than K.
      top_logprob_BTK: the teacher's log-probs of `top_ids_BTK`; -inf where the id is -1.
      hidden_BTH: last hidden states, from which `head` makes the full distribution a slice at a time.
      head: maps hidden [..., H] to logits [..., V] at temperature 1; None where no distribution can be had.
      failures: row -> why it could not be scored. Such a row is False in `valid_BT` all along.
      stats: what asking cost, e.g. {"retries": 2, "requests": 16}; sums, not means.
      span_ids_BT: tokens of a row with one id were scored as one piece, whose log-prob they share; -1 where there is no
        score. None where every token was scored by itself.
      parts: where several teachers stand behind one, each one's own log-probs of the sampled tokens, by its name; nan
        where it was not asked or gave none. Empty for a single teacher.
    """

    logprob_BT: Float[Tensor, "B T"]
    valid_BT: Bool[Tensor, "B T"]
    temperature: float = 1.0
    top_ids_BTK: Int[Tensor, "B T K"] | None = None
    top_logprob_BTK: Float[Tensor, "B T K"] | None = None
    hidden_BTH: Float[Tensor, "B T H"] | None = None
    head: Callable[[Tensor], Tensor] | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    stats: Mapping[str, float] = field(default_factory=dict)
    span_ids_BT: Int[Tensor, "B T"] | None = None
    parts: Mapping[str, Float[Tensor, "B T"]] = field(default_factory=dict)

    @property
    def tail_logprob_BT(self) -> Float[Tensor, "B T"]:
        """Log of the mass that `top_logprob_BTK` leaves out: log(1 - sum_k exp(top)); -inf where nothing is left."""
        if self.top_logprob_BTK is None:
            raise ValueError("these scores have no top-k support; ask the teacher for top_k")
        mass_BT = self.top_logprob_BTK.double().exp().sum(-1).clamp(max=1.0)
        return torch.log1p(-mass_BT).to(self.top_logprob_BTK.dtype)

    def placed(self, picked: Sequence[int], num_rows: int, width: int) -> "TeacherScores":
        """These scores as some rows among `num_rows`, padded or cut to `width` tokens; the other rows have none.

        Args:
          picked: the place of each of these rows.
          num_rows: B of the result.
          width: T of the result.
        """

        def place(value: Tensor | None, fill: float) -> Tensor | None:
            if value is None:
                return None
            out = value.new_full((num_rows, width, *value.shape[2:]), fill)
            shared = min(width, value.shape[1])
            out[list(picked), :shared] = value[:, :shared]
            return out

        logprob_BT, valid_BT = place(self.logprob_BT, 0), place(self.valid_BT, False)
        assert logprob_BT is not None
        assert valid_BT is not None
        return replace(
            self,
            logprob_BT=logprob_BT,
            valid_BT=valid_BT,
            top_ids_BTK=place(self.top_ids_BTK, -1),
            top_logprob_BTK=place(self.top_logprob_BTK, -torch.inf),
            hidden_BTH=place(self.hidden_BTH, 0),
            failures={picked[row]: reason for row, reason in self.failures.items()},
            span_ids_BT=place(self.span_ids_BT, -1),
            parts={name: part for name, value in self.parts.items() if (part := place(value, torch.nan)) is not None},
        )

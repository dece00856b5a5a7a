"""KL agreement trap termination: distils only the part of a response before teacher and student agree out of habit.

No official code was found. RECONSTRUCTED: the exempt span and what a trigger inside it does, the stride of the
windows, whose top-k the support is, what enters the buffer, and the normaliser. Ours: at least `min_keep` tokens stay.
Without a verifier the trap ends responses while they are written (`hybrid.online_stop`); with one beside it the same
cut masks complete responses.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from hybrid.methods.base import MethodConfig
from hybrid.objective.kl_trap import Estimator, OnlineStop, Trap, TrapMemory, keep_before_kl_trap
from hybrid.objective.losses import Divergence, SampledDivergence
from hybrid.objective.objective import Objective, objective
from hybrid.objective.reductions import kept_token_mean, response_mean
from hybrid.objective.signals import from_teacher_known
from hybrid.objective.step import chain


class Kat(MethodConfig):
    """Reverse KL on the tokens before a persistent run of low KL; the threshold follows the latest responses."""

    formula: ClassVar[str] = (
        "d_t = KL(pS || pT);  z_t = mean of the last W values of d;  m(y) = min z;  s = quantile_{1 - eta} of past m;  "
        "C windows below s in a row fire; keep t < start of the first of them;  c = 1 on kept tokens"
    )
    paper: ClassVar[str] = "The KL agreement trap, KAT (arXiv 2606.09471)"
    sources: ClassVar[Mapping[str, str]] = {
        "window": "paper, appendix",
        "patience": "paper, appendix: C",
        "eta": "paper, appendix (0.1 in the running text)",
        "buffer": "paper, appendix",
        "min_samples": "paper, appendix",
        "warmup_steps": "paper, appendix",
        "n_exempt": "RECONSTRUCTED: two windows; the paper has such a span, its length was not found",
        "exempt_trigger": "RECONSTRUCTED",
        "stride": "RECONSTRUCTED: the formula has a window at every token",
        "min_keep": "ours",
        "reduction": "RECONSTRUCTED",
        "top_k": "paper: 64 and a tail",
        "support": "RECONSTRUCTED: whose top 64 is not stated",
        "online": "paper: online; with a verifier ours, masking",
        "online_chunk": "ours; the paper looks at every token",
        "estimator": "paper for kl; k1 and k3 are ours, for teachers without a distribution",
    }

    name: Literal["kat"] = "kat"
    window: int = Field(default=64, ge=1, description="Tokens per window, W.")
    patience: int = Field(default=4, ge=1, description="Low windows in a row that fire the trigger, C.")
    eta: float = Field(
        default=0.3, ge=0, le=1, description="The threshold is the (1 - eta)-quantile of remembered minima."
    )
    buffer: int = Field(default=4096, ge=1, description="Responses that are remembered.")
    min_samples: int = Field(default=512, ge=0, description="Remembered responses before anything is cut.")
    warmup_steps: int = Field(default=50, ge=0, description="Updates before anything is cut.")
    n_exempt: int = Field(
        default=128, ge=0, description="No cut lies before this token (RECONSTRUCTED; also 0 or 256)."
    )
    exempt_trigger: Literal["ignored", "deferred"] = Field(
        default="ignored",
        description="A run that began within the exempt span is ignored until it ends, or cuts at the span's end if it "
        "lasts that long (RECONSTRUCTED).",
    )
    stride: int = Field(
        default=1, ge=1, description="Tokens between windows: 1, or W for disjoint ones (RECONSTRUCTED)."
    )
    min_keep: int = Field(default=1, ge=0, description="Tokens that stay in any case; 0 lets a response drop out.")
    reduction: Literal["kept_token_mean", "kept_response_mean"] = Field(
        default="kept_token_mean", description="Mean over kept tokens, or over responses of such means (RECONSTRUCTED)."
    )
    top_k: int = Field(
        default=64, ge=0, description="Size of the support, with a tail bucket; 0 is the full vocabulary."
    )
    support: Literal["student", "teacher", "union"] = Field(
        default="student", description="Whose top-k (RECONSTRUCTED)."
    )
    estimator: Estimator = Field(
        default="kl",
        description="d_t: the reverse KL; or k1 or k3 of the sampled token, with k2 as the loss: not the paper's "
        "method, and marked by the metric kl_trap/estimated.",
    )

    online: bool | Literal["auto"] = Field(
        default="auto",
        description="Ends a response while it is written, where its trap fires: auto where it can be done, which is "
        "with a local teacher and without a reward, as a cut response has no answer; true refuses a run where it "
        "cannot, and takes an experiment's rewards for its evaluation alone; false masks complete responses.",
    )
    online_chunk: int = Field(
        default=0,
        ge=0,
        description="Tokens between two looks at a response that is being written; 0 is every token where the student "
        "generates in this process, and 128 where an engine does.",
    )

    @model_validator(mode="after")
    def _refuse_gaps(self) -> Self:
        if self.stride > self.window:
            raise ValueError(f"stride {self.stride} is wider than window {self.window}; use 1 or {self.window}")
        return self

    @override
    def build(self) -> Objective:
        trap = keep_before_kl_trap(trap=self.trap, memory=self.memory, estimator=self.estimator)
        return objective(
            name=self.name,
            credit=chain(from_teacher_known(), trap),
            loss=self.loss(),
            reduction=kept_token_mean() if self.reduction == "kept_token_mean" else response_mean(kept=True),
        )

    @property
    @override
    def online_stop(self) -> OnlineStop | None:
        if self.online is False:
            return None
        loss = self.loss()
        return OnlineStop(
            self.trap,
            self.memory,
            self.estimator,
            divergence=loss if isinstance(loss, Divergence) else None,
            chunk=self.online_chunk,
            required=self.online is True,
        )

    @property
    def trap(self) -> Trap:
        """When a response is cut, for the online stop too."""
        return Trap(self.window, self.patience, self.n_exempt, self.stride, self.min_keep, self.exempt_trigger)

    @property
    def memory(self) -> TrapMemory:
        """How the threshold comes about."""
        return TrapMemory(self.eta, self.buffer, self.min_samples, self.warmup_steps)

    def loss(self) -> Divergence | SampledDivergence:
        """Reverse KL; its sampled stand-in with the same on-policy gradient where only sampled scores exist."""
        if self.estimator != "kl":
            return SampledDivergence("k2")
        return Divergence("reverse_kl", self.support if self.top_k else "full", self.top_k or 64)

"""Scores rows with a model of this process: batches, shifts by one, and turns a slice of states into log-probs.

Shape letters: R rows of a batch, L its longest prompt and completion, N completion positions of the batch (flat),
X state width, V vocabulary, K support; B and T as in `TeacherScores`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from teachers.decoder import Decoder
from teachers.errors import TeacherCannot, TeacherError, TeacherMismatch
from teachers.pixels import ImageInputs
from teachers.protocol import Row, Want
from teachers.scores import TeacherScores


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """How a model of this process scores.

    Attributes:
      temperature: logits are divided by it before the softmax; above 0.
      batch_size: rows of one forward at most.
      token_budget: padded positions of one forward at most, prompt and completion together; None for no such limit. A
        row that is longer goes alone.
      chunk: completion positions whose [chunk, V] logits are held at once.
      vocab_size: real ids that student and teacher share; logits beyond them are padding and are cut off.
      max_length: prompt and completion together; longer rows are masked and named in `failures`. None for what the
        model was built for.
    """

    temperature: float = 1.0
    batch_size: int = 8
    token_budget: int | None = None
    chunk: int = 512
    vocab_size: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be scored with.

        Raises:
          TeacherError: names the setting, its value and what it must be.
        """
        if not 0 < self.temperature < float("inf"):
            raise TeacherError(
                f"temperature must be above 0 and finite; got {self.temperature}. Greedy scores are no distribution: "
                "sample and score at one temperature above 0"
            )
        for name in ("batch_size", "token_budget", "chunk", "vocab_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TeacherError(f"{name} must be at least 1; got {value}")


@dataclass
class _Sheet:
    """The answer while it is being filled in; tensors appear with the first batch, on its device."""

    num_rows: int
    width: int
    want: Want
    logprob_BT: Tensor | None = None
    valid_BT: Tensor | None = None
    top_ids_BTK: Tensor | None = None
    top_logprob_BTK: Tensor | None = None
    hidden_BTX: Tensor | None = None

    def open(self, device: torch.device, dtype: torch.dtype, state_width: int, state_dtype: torch.dtype) -> None:
        shape = (self.num_rows, self.width)
        self.logprob_BT = torch.zeros(shape, dtype=dtype, device=device)
        self.valid_BT = torch.zeros(shape, dtype=torch.bool, device=device)
        num_support = self.want.top_k
        if self.want.candidates_BTK is not None:
            num_support = self.want.candidates_BTK.shape[2]
        if num_support or self.want.candidates_BTK is not None:
            self.top_ids_BTK = torch.full((*shape, num_support), -1, dtype=torch.long, device=device)
            self.top_logprob_BTK = torch.full((*shape, num_support), float("-inf"), dtype=dtype, device=device)
        if self.want.distribution:
            self.hidden_BTX = torch.zeros((*shape, state_width), dtype=state_dtype, device=device)


@dataclass(frozen=True)
class _Places:
    """Where the N completion tokens of a batch stand: in the batch (row, position) and in the answer (row, token)."""

    batch_row_N: Tensor
    position_N: Tensor
    row_N: Tensor
    token_N: Tensor
    target_N: Tensor


class Scorer:
    """Scores rows with one model. Teachers of this process differ only in whose weights it sees."""

    def __init__(
        self,
        model: nn.Module,
        settings: ScoreSettings,
        *,
        name: str,
        images: ImageInputs | None = None,
        forward_module: nn.Module | None = None,
    ):
        """Binds a model; nothing is computed yet.

        Args:
          model: the causal language model.
          settings: temperature, batch sizes and limits.
          name: the teacher's name, for messages.
          images: turns a row's pictures into tensors; None for a model of text.
          forward_module: see `Decoder`.
        """
        self.model = model
        self.settings = settings
        self.name = name
        self.images = images
        self.decoder = Decoder(model, forward_module=forward_module, vocab_size=settings.vocab_size)

    @property
    def max_length(self) -> int | None:
        """Longest prompt and completion together, in tokens."""
        if self.settings.max_length is not None:
            return self.settings.max_length
        config = getattr(self.model, "config", None)
        return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)

    @torch.no_grad()  # not inference_mode: hidden states must be usable as constants of the student's graph
    def score(self, rows: Sequence[Row], want: Want) -> TeacherScores:
        """Scores `rows`; see `teachers.protocol.Teacher`.

        Raises:
          TeacherMismatch: an id lies outside the vocabulary, a prompt is empty, or pictures and placeholders differ.
          TeacherCannot: pictures for a teacher without a processor.
          TeacherError: `want` asks for two supports at once, or its candidates have another shape than the rows.
        """
        width = max((len(row.completion_ids) for row in rows), default=0)
        self._check(rows, want, width)
        failures = {i: reason for i, row in enumerate(rows) if (reason := self._too_long(row)) is not None}
        scorable = [i for i, row in enumerate(rows) if row.completion_ids and i not in failures]
        sheet = _Sheet(len(rows), width, want)
        num_positions = 0
        batches = self._batches(rows, scorable)
        with evaluating(self.model):
            for batch in self._in_step(batches):
                states_RLX = self.decoder.states(self._inputs([rows[i] for i in batch]))
                num_positions += states_RLX.shape[0] * states_RLX.shape[1]
                self._fill(sheet, states_RLX, _places(rows, batch, states_RLX.device))
        if sheet.logprob_BT is None:
            sheet.open(self.decoder.device, torch.float32, self.decoder.state_width, torch.float32)
        assert sheet.logprob_BT is not None
        assert sheet.valid_BT is not None
        return TeacherScores(
            logprob_BT=sheet.logprob_BT,
            valid_BT=sheet.valid_BT,
            temperature=self.settings.temperature,
            top_ids_BTK=sheet.top_ids_BTK,
            top_logprob_BTK=sheet.top_logprob_BTK,
            hidden_BTH=sheet.hidden_BTX,
            head=self.decoder.kept_head() if want.distribution else None,
            failures=failures,
            stats={"rows": float(len(rows)), "batches": float(len(batches)), "positions": float(num_positions)},
        )

    def _check(self, rows: Sequence[Row], want: Want, width: int) -> None:
        if want.top_k and want.candidates_BTK is not None:
            raise TeacherError("ask for the teacher's top_k or for the student's candidates, not for both at once")
        candidates = want.candidates_BTK
        if candidates is not None and (candidates.shape[0] != len(rows) or candidates.shape[1] < width):
            raise TeacherError(
                f"candidates_BTK has shape {tuple(candidates.shape)}; it needs {len(rows)} rows of at least {width} "
                "tokens, one for each completion"
            )
        num_ids, shared = self.decoder.num_ids, self.settings.vocab_size
        for i, row in enumerate(rows):
            if not row.prompt_ids:
                raise TeacherMismatch(
                    f"row {i} has an empty prompt, so nothing predicts its first token; begin it with the BOS id"
                )
            if row.images and self.images is None:
                raise TeacherCannot(f"row {i} has images, and teacher {self.name!r} has no processor; pass processor=")
            if num_ids is not None and max((*row.prompt_ids, *row.completion_ids)) >= num_ids:
                raise TeacherMismatch(_out_of_range(i, max((*row.prompt_ids, *row.completion_ids)), num_ids))
            if shared is not None and max(row.completion_ids, default=0) >= shared:
                raise TeacherMismatch(_out_of_range(i, max(row.completion_ids), shared))
        limit = shared if shared is not None else num_ids
        if candidates is not None and candidates.numel() and limit is not None and int(candidates.max()) >= limit:
            row = int(candidates.flatten(1).amax(1).argmax())
            raise TeacherMismatch(_out_of_range(row, int(candidates.max()), limit))

    def _too_long(self, row: Row) -> str | None:
        length, limit = len(row.prompt_ids) + len(row.completion_ids), self.max_length
        if limit is None or length <= limit:
            return None
        return (
            f"{len(row.prompt_ids)} prompt and {len(row.completion_ids)} completion tokens are {length}, "
            f"more than the {limit} that teacher {self.name!r} takes"
        )

    def _batches(self, rows: Sequence[Row], scorable: Sequence[int]) -> list[list[int]]:
        # longest first, so that memory runs out at once or not at all, and rows of a batch are about as long
        length = {i: len(rows[i].prompt_ids) + len(rows[i].completion_ids) for i in scorable}
        budget = self.settings.token_budget
        batches: list[list[int]] = []
        for i in sorted(scorable, key=lambda i: -length[i]):
            last = batches[-1] if batches else None
            is_full = last is None or len(last) == self.settings.batch_size
            if last is not None and budget is not None:
                is_full = is_full or length[last[0]] * (len(last) + 1) > budget
            if is_full or last is None:
                batches.append([i])
            else:
                last.append(i)
        return batches

    def _in_step(self, batches: list[list[int]]) -> Iterator[list[int]]:
        """Yields `batches`; under ZeRO-3 each rank also takes part in the forwards that only other ranks need."""
        num_batches = len(batches)
        distributed = torch.distributed
        if self.decoder.is_sharded and distributed.is_available() and distributed.is_initialized():
            most = torch.tensor(num_batches, device=self.decoder.device)
            distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
            num_batches = int(most)
        yield from batches
        for _ in range(len(batches), num_batches):
            yield []

    def _inputs(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        # Padding stands on the right: positions then count from 0 in every row without being told, and causal
        # attention keeps padding out of sight of the real tokens, whatever the architecture does with its mask.
        sequences = [(*row.prompt_ids, *row.completion_ids) for row in rows] or [(0,)]
        width = max(len(ids) for ids in sequences)
        device = self.decoder.device
        inputs = {
            "input_ids": torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in sequences], device=device),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences], device=device
            ),
        }
        if self.images is not None:
            inputs |= self.images.inputs(rows, inputs["input_ids"], self.decoder.accepts)
        return inputs

    def _fill(self, sheet: _Sheet, states_RLX: Tensor, places: _Places) -> None:
        states_NX = states_RLX[places.batch_row_N, places.position_N]
        with self.decoder.gathered():
            for start in range(0, states_NX.shape[0], self.settings.chunk):
                part = slice(start, start + self.settings.chunk)
                logits_NV = self.decoder.head(states_NX[part]) / self.settings.temperature
                logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
                if sheet.logprob_BT is None:
                    sheet.open(logits_NV.device, logits_NV.dtype, states_NX.shape[1], states_NX.dtype)
                _write(sheet, logits_NV, places, part)
        if sheet.hidden_BTX is not None:
            sheet.hidden_BTX[places.row_N, places.token_N] = states_NX.to(sheet.hidden_BTX.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout and its like off, and afterwards on again in the modules where it was on."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _places(rows: Sequence[Row], batch: Sequence[int], device: torch.device) -> _Places:
    # token t of the completion is predicted at position len(prompt) + t - 1
    length_R = torch.tensor([len(rows[i].completion_ids) for i in batch], dtype=torch.long)
    start_R = torch.tensor([len(rows[i].prompt_ids) - 1 for i in batch], dtype=torch.long)
    batch_row_N = torch.arange(len(batch)).repeat_interleave(length_R)
    token_N = torch.arange(len(batch_row_N)) - (length_R.cumsum(0) - length_R)[batch_row_N]
    target_N = torch.tensor([token for i in batch for token in rows[i].completion_ids], dtype=torch.long)
    return _Places(
        batch_row_N=batch_row_N.to(device),
        position_N=(start_R[batch_row_N] + token_N).to(device),
        row_N=torch.tensor(batch, dtype=torch.long)[batch_row_N].to(device),
        token_N=token_N.to(device),
        target_N=target_N.to(device),
    )


def _write(sheet: _Sheet, logits_NV: Tensor, places: _Places, part: slice) -> None:
    assert sheet.logprob_BT is not None
    assert sheet.valid_BT is not None
    device = logits_NV.device
    row_N, token_N = places.row_N[part].to(device), places.token_N[part].to(device)
    target_N = places.target_N[part].to(device)
    log_total_N = logits_NV.logsumexp(-1)
    sheet.logprob_BT[row_N, token_N] = logits_NV.gather(1, target_N[:, None])[:, 0] - log_total_N
    sheet.valid_BT[row_N, token_N] = True
    if sheet.top_ids_BTK is None or sheet.top_logprob_BTK is None:
        return
    if sheet.want.candidates_BTK is None:
        top_NK, ids_NK = logits_NV.topk(min(sheet.want.top_k, logits_NV.shape[1]), dim=-1)
        num_support = ids_NK.shape[1]
    else:
        ids_NK = sheet.want.candidates_BTK.to(device)[row_N, token_N].long()
        num_support = ids_NK.shape[1]
        top_NK = logits_NV.gather(1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, float("-inf"))
    sheet.top_ids_BTK[row_N, token_N, :num_support] = ids_NK
    sheet.top_logprob_BTK[row_N, token_N, :num_support] = top_NK - log_total_N[:, None]


def _out_of_range(row: int, token: int, limit: int) -> str:
    return (
        f"row {row} has id {token}, and this teacher knows ids 0..{limit - 1}; student and teacher must share a "
        "tokenizer, or the teacher must be aligned across tokenizers"
    )

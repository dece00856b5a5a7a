"""A frozen model of this process as a teacher."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from teachers.alongside import Alongside
from teachers.errors import TeacherCannot, TeacherError
from teachers.pixels import ImageInputs
from teachers.protocol import SAMPLED, Row, Want
from teachers.scores import TeacherScores
from teachers.scoring import Scorer, ScoreSettings

FINGERPRINT_SAMPLES = 64
"""Values of each weight that go into a fingerprint; enough to tell two checkpoints of one model apart."""

Quantization = Literal["4bit", "8bit"]


class LocalTeacher:
    """Scores with a Hugging Face causal language model, on its own device and in its own dtype.

    The model is frozen here: no gradients, no dropout, no optimizer state. Log-probs are float32 whatever the weights
    are, and [B, T, V] is never held: the head is applied to `chunk` positions at a time. Scores stand on the model's
    device.

    Under DeepSpeed, pass the plain model and its prepared engine as `forward_module`, or call `shard` later. With
    ZeRO-3 `score` is then a collective call: every rank makes it, with as many rows as it likes.
    """

    needs_extra_tokens = 0
    """A model of this process generates nothing while it scores, unlike a server."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        name: str = "teacher",
        temperature: float = 1.0,
        batch_size: int = 8,
        token_budget: int | None = None,
        chunk: int = 512,
        vocab_size: int | None = None,
        max_length: int | None = None,
        processor: Any = None,
        device: str | torch.device | None = None,
        forward_module: nn.Module | None = None,
    ):
        """Freezes `model` and takes it as it is.

        Args:
          model: a causal (or image-text-to-text) language model of transformers, possibly with PEFT adapters.
          tokenizer: kept for the preflight; ids come in, so nothing is tokenised here.
          name: by which messages, metrics and recordings know this teacher.
          temperature: see `ScoreSettings`, as are the following.
          batch_size: rows of one forward.
          token_budget: padded positions of one forward; None for no limit.
          chunk: completion positions of one slice of logits.
          vocab_size: real ids shared with the student, where the logits are wider.
          max_length: longest prompt and completion together; None for what the model was built for.
          processor: makes tensors of the rows' images; needed only where rows have images.
          device: where the model is moved; None leaves it where it is.
          forward_module: the model as wrapped by DeepSpeed or DDP.

        Raises:
          TeacherError: a setting is out of range.
        """
        if device is not None:
            model = model.to(device)
        model.eval()
        model.requires_grad_(False)
        self.name = name
        self.tokenizer = tokenizer
        self.settings = ScoreSettings(
            temperature=temperature,
            batch_size=batch_size,
            token_budget=token_budget,
            chunk=chunk,
            vocab_size=vocab_size,
            max_length=max_length,
        )
        images = None if processor is None else ImageInputs.of(processor, model)
        self._scorer: Scorer | None = Scorer(
            model, self.settings, name=name, images=images, forward_module=forward_module
        )
        self._fingerprint: str | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        quantization: Quantization | None = None,
        name: str = "teacher",
        temperature: float = 1.0,
        batch_size: int = 8,
        token_budget: int | None = None,
        chunk: int = 512,
        vocab_size: int | None = None,
        max_length: int | None = None,
    ) -> "LocalTeacher":
        """Loads a model with its tokenizer, and its processor where the model reads images.

        Args:
          path: a folder, or a name on the hub.
          dtype: of the weights, such as "bfloat16"; "auto" is that of the checkpoint.
          device: such as "cuda:1"; None is the first GPU where there is one, else the CPU.
          quantization: "4bit" (NF4) or "8bit" through bitsandbytes.
          name: see the constructor, as are the following.
          temperature: logits are divided by it.
          batch_size: rows of one forward.
          token_budget: padded positions of one forward.
          chunk: completion positions of one slice of logits.
          vocab_size: real ids shared with the student.
          max_length: longest prompt and completion together.

        Raises:
          TeacherCannot: quantization is asked for, and bitsandbytes is not installed.
          TeacherError: there is no model at `path`.
        """
        import transformers

        from teachers.processors import load_processor, model_config, reads_images

        place = device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {"dtype": dtype}
        if quantization is not None:
            options |= {"quantization_config": _quantized(quantization, dtype), "device_map": {"": str(place)}}
        try:
            config = model_config(path)
            has_images = reads_images(path)
            family = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
            model = family.from_pretrained(path, config=config, **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            processor = load_processor(path) if has_images else None
        except (OSError, ValueError) as error:
            raise TeacherError(f"no model could be loaded from {str(path)!r} for teacher {name!r}: {error}") from error
        return cls(
            model,
            tokenizer,
            name=name,
            temperature=temperature,
            batch_size=batch_size,
            token_budget=token_budget,
            chunk=chunk,
            vocab_size=vocab_size,
            max_length=max_length,
            processor=processor,
            device=None if quantization is not None else place,
        )

    @property
    def model(self) -> nn.Module:
        """The frozen model."""
        return self._open().model

    @property
    def model_name(self) -> str:
        """Path or hub name that the model was loaded from; its class where it was made in memory."""
        return getattr(getattr(self.model, "config", None), "_name_or_path", "") or type(self.model).__name__

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and completion together, in tokens."""
        return self._open().max_length

    @property
    def is_collective(self) -> bool:
        """Whether every rank must ask together, if need be for no rows: ZeRO-3 spreads the weights."""
        return self._open().decoder.is_sharded

    @property
    def logit_width(self) -> int | None:
        """Ids that the model can be fed with, padding of the vocabulary included."""
        return self._open().decoder.num_ids

    @property
    def vocab_size(self) -> int | None:
        """Ids that the softmax runs over."""
        return self.settings.vocab_size or self.logit_width

    @property
    def fingerprint(self) -> str | None:
        """Tells this model at these settings from any other; None for sharded weights, which no rank sees whole."""
        if self._fingerprint is None and not self._open().decoder.is_sharded:
            self._fingerprint = fingerprint(
                self.model, temperature=self.settings.temperature, vocab_size=self.settings.vocab_size
            )
        return self._fingerprint

    def score(self, rows: Sequence[Row], want: Want = SAMPLED) -> TeacherScores:
        """Scores `rows`; see `teachers.protocol.Teacher` and `teachers.scoring.Scorer.score`."""
        return self._open().score(rows, want)

    def alongside(self) -> Alongside:
        """This model as a reader of responses that are still being written.

        Raises:
          TeacherCannot: ZeRO-3 spreads its weights, and ranks write at their own pace.
        """
        scorer = self._open()
        if scorer.decoder.is_sharded:
            raise TeacherCannot(
                f"teacher {self.name!r} is sharded by ZeRO-3, so it cannot read along; use another stage"
            )
        return Alongside(scorer.model, images=scorer.images, vocab_size=self.settings.vocab_size)

    def shard(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        """Scores through a wrapper from now on, such as DeepSpeed's ZeRO-3 engine; a second call does nothing.

        Args:
          wrap: spreads the weights over the ranks, in place, and returns the module to call.
        """
        scorer = self._open()
        if scorer.decoder.forward_module is scorer.model:
            self._scorer = Scorer(
                scorer.model,
                self.settings,
                name=self.name,
                images=scorer.images,
                forward_module=wrap(scorer.model),
            )

    def close(self) -> None:
        """Lets go of the model."""
        self._scorer = None

    def _open(self) -> Scorer:
        if self._scorer is None:
            raise TeacherError(f"teacher {self.name!r} was closed; make a new one to score again")
        return self._scorer


def fingerprint(model: nn.Module, *, temperature: float, vocab_size: int | None) -> str:
    """A hash of everything that scores depend on.

    Of each weight its name, shape, dtype and `FINGERPRINT_SAMPLES` evenly spaced values are taken, so that a model of
    many billions costs no more than a small one.

    Args:
      model: whose config and weights are looked at.
      temperature: of the scores.
      vocab_size: number of ids that the softmax runs over; None for all.

    Returns:
      16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    told = config.to_dict() if config is not None else {}
    # where a model was loaded from and by which release does not change its scores
    told = {k: v for k, v in told.items() if k not in {"_name_or_path", "transformers_version"}}
    told = {"config": told, "temperature": temperature, "vocab_size": vocab_size}
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        stride = max(1, flat.numel() // FINGERPRINT_SAMPLES)
        values = (
            flat[::stride].to(torch.float64).tolist() if weight.dtype.is_floating_point else flat[::stride].tolist()
        )
        digest.update(json.dumps([name, list(weight.shape), str(weight.dtype), values]).encode())
    return digest.hexdigest()[:16]


def _quantized(quantization: Quantization, dtype: str | torch.dtype) -> Any:
    import transformers

    if find_spec("bitsandbytes") is None:
        raise TeacherCannot(
            f"quantization={quantization!r} needs the package bitsandbytes, which is not installed here; "
            "install it, or load the teacher without quantization"
        )
    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    compute = torch.bfloat16 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=True
    )


def local_teachers(teacher: Any) -> Iterator[LocalTeacher]:
    """The models of this process behind a teacher, whose weights may be spread; not behind a cache.

    Where a cache has some rows of one rank and others of another, they would not ask together.
    """
    if isinstance(teacher, LocalTeacher):
        yield teacher
    for inner in getattr(teacher, "inner_teachers", ()):
        yield from local_teachers(inner)

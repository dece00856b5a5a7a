"""`HybridTrainer` and `HybridConfig`: TRL's GRPO trainer with an objective in place of the group advantage.

The only file that imports trl. The overridden seams (design section 4) are pinned by `tests/parity/test_trl_seams.py`.
Everything TRL's users know stays: `GRPOConfig` fields, reward functions, callbacks, PEFT, VLM datasets.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from hybrid.asking import prompts_shown, teacher_metrics, together
from hybrid.checkpoints import PlacedSampler, begin, publish, random_state, set_random_state, writing
from hybrid.collect import (
    Plan,
    StudentMeasures,
    asked,
    foreign_ids,
    join,
    score_candidates,
    score_views,
    scorers_of,
    to_view,
)
from hybrid.contexts import Writer, judge_of
from hybrid.cutting import Piece, even_pieces
from hybrid.distributions import Request, add_distribution_head
from hybrid.errors import ConfigError
from hybrid.following import AfterUpdate
from hybrid.gather import gather_batch, longest, padded
from hybrid.generation import (
    IMAGE_KEYS,
    Generation,
    StepWatch,
    after_prompts,
    check_rows,
    check_run,
    check_scorers,
    corrected,
    image_inputs,
    largest_gap,
    own_generation,
    parent_advantage,
    parent_term,
    part_of,
    set_clipping,
)
from hybrid.methods import MethodConfig, method_of
from hybrid.methods.base import card_of
from hybrid.micro_batches import MicroBatches, halves, logps_of, take, tiled
from hybrid.objective.objective import Assignment, Objective, values
from hybrid.online_stop import RunFacts, as_batch, chosen_stop, write_online
from hybrid.phases import Phases, Tell
from hybrid.rollouts import Judged, Rollout, no_reward, rollouts_of
from hybrid.run_state import read_state, teachers_with_state, with_heads, without_heads, write_state
from hybrid.skips import Skips
from hybrid.student import answered, loss_request, measure_student, sampled_logps, student_pass
from hybrid.types import Demonstration, RolloutBatch
from hybrid.views import scorers_for
from teachers.contexts import PromptStyle
from teachers.errors import TeacherError
from teachers.local import local_teachers
from teachers.protocol import SAMPLED

log = logging.getLogger(__name__)


@dataclass
class HybridConfig(GRPOConfig):
    """`GRPOConfig` with defaults that fit: no reporter, no bf16 on a machine without a GPU, one generation allowed.

    Attributes:
      bad_gradients: updates with NaN or infinite gradients are left out; so many in a row stop the run.
      max_tokens_per_micro_batch: the rows of a forward and backward are sorted by length and cut into micro-batches of
        at most so many padded tokens, prompt and completion together; None for no such limit.
    """

    bad_gradients: int = 10
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        if not torch.cuda.is_available() and self.bf16 is None:
            self.use_cpu, self.bf16 = True, False
        if self.report_to is None or self.report_to == "all":
            self.report_to = "none"
        if self.gradient_checkpointing is not None and self.activation_checkpointing is None:
            # TRL sets the old name by default, of which transformers warns on every run.
            self.activation_checkpointing = self.gradient_checkpointing
            self.gradient_checkpointing = None  # pyright: ignore[reportAttributeAccessIssue]
        single = self.num_generations == 1
        if single:
            # TRL refuses one generation because its advantage needs two; the methods say themselves what they need.
            self.num_generations = 2
        super().__post_init__()
        if single:
            self.num_generations = 1
        epsilon_high = self.epsilon_high if self.epsilon_high is not None else self.epsilon
        if self.loss_type == "cispo" and epsilon_high < 1:
            raise ConfigError(
                f"loss_type cispo clips every ratio at epsilon_high = {epsilon_high}, which shrinks all gradients; "
                "set epsilon_high to 1 or more (5.0 in its paper)"
            )


class HybridTrainer(GRPOTrainer):
    """Trains a student by an objective of reward and teacher terms.

    Args:
      model: the student: a path, a hub name or a loaded causal language model.
      method: a method's settings (`Opdvr()`), its name, or an `Objective` of your own.
      teacher: a `Teacher`, a path or a loaded model for the view "teacher"; a `ViewSpec` for the student itself; or a
        mapping view -> `Scorer`. Views that the method makes of the student itself need none.
      reward_funcs: TRL reward functions; may be left out where the method needs no reward.
      args: a `HybridConfig`.
      train_dataset: rows with a `prompt`, and the columns that the reward functions read.
      peft_config: a LoRA configuration, as in TRL.
      watch: called with a `StepWatch` after each credit assignment (main process); the student's log-probs are then
        measured for every method, so that the record is whole.
      writer: how privileged prompts are written; by default with the student's own template.
      contexts: own words of privileged contexts by name, in place of those of `teachers/contexts.py`; each is a text
        that ends with {prompt}.
      progress: told how far generation, scoring and updates of a step are.
      say: given what a person shall read once, such as a teacher's rendered prompt; None logs it.

    All other arguments are TRL's.

    Raises:
      ConfigError: the method needs a reward, a teacher or more generations than this run has, or a field of TRL's
        config is set that would change nothing.
      PreflightFailed: the teacher has another tokenizer than the student.

    Example:
      >>> trainer = HybridTrainer("my-student", method="opdvr", teacher="my-teacher", reward_funcs=[correct],
      ...                         args=HybridConfig("out"), train_dataset=prompts)
      >>> trainer.train()
    """

    # The parent's attributes, whose types transformers leaves open.
    args: HybridConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Any
    model_wrapped: Any
    optimizer: Any
    accelerator: Any
    _tokenizer: Any

    def __init__(
        self,
        model: Any,
        method: MethodConfig | Objective | str | Mapping[str, Any] = "grpo",
        teacher: Any = None,
        reward_funcs: Any = None,
        args: HybridConfig | None = None,
        train_dataset: Dataset | None = None,
        *,
        watch: Callable[[StepWatch], None] | None = None,
        writer: Writer | None = None,
        contexts: Mapping[str, str] | None = None,
        progress: Tell | None = None,
        say: Callable[[str], None] | None = None,
        **trl: Any,
    ) -> None:
        args = args if args is not None else HybridConfig()
        self.method = method if isinstance(method, Objective) else method_of(method)
        self.objective = self.method if isinstance(self.method, Objective) else self.method.build()
        self.plan = Plan.of(self.objective)
        self.plan = self.plan if watch is None else self.plan.recording()
        self.rewarded = bool(reward_funcs)
        self.watch = watch
        self.method_state = self.objective.init()
        self.phases = Phases(progress)
        self._judged: Judged | None = None
        self._generation: Generation | None = None
        self._evaluated: Generation | None = None
        self._request: Request | None = None
        self._early: dict[str, Tensor] | None = None
        self._pass: dict[str, Tensor] | None = None
        check_run(self.method, self.plan, args, rewarded=self.rewarded)
        check_rows(train_dataset, args)
        self._parent_term = parent_term(self.objective, args)
        self._cutting: MicroBatches | None = None
        self._name, self._paper, self._tag_names = card_of(self.method)
        super().__init__(model, reward_funcs=reward_funcs or [no_reward], args=args, train_dataset=train_dataset, **trl)  # pyright: ignore[reportCallIssue]
        unwrapped: Any = self.accelerator.unwrap_model(self.model)
        if args.max_tokens_per_micro_batch is not None:
            self._cutting = MicroBatches(self)
        add_distribution_head(unwrapped.get_base_model() if hasattr(unwrapped, "get_base_model") else unwrapped)
        if isinstance(teacher, str | os.PathLike | torch.nn.Module):
            teacher = scorers_of(teacher, self.temperature, self._processor, args.max_tokens_per_micro_batch)
        self._make_scorers = partial(
            scorers_for,
            self.plan,
            getattr(self.method, "views", {}),
            teacher,
            student=unwrapped,
            writer=writer or self._writer(contexts or {}),
            temperature=self.temperature,
            batch_size=args.per_device_train_batch_size,
            token_budget=args.max_tokens_per_micro_batch,
        )
        self.scorers = self._make_scorers()
        self._bound = False
        self._staging = ""
        self._say, self._has_shown = say or log.info, False
        self._skips = Skips(args.bad_gradients)
        check_scorers(self.method, self.plan, self.scorers)
        for finding in foreign_ids(self.scorers, self._tokenizer):
            log.warning("%s", finding)
        facts = RunFacts(
            args=args,
            rewarded=self.rewarded,
            zero_stage=getattr(getattr(self.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0),
            tools=bool(self.tools),
            pictures=self._processor is not None,
        )
        self._online = chosen_stop(getattr(self.method, "online_stop", None), self.scorers, facts)
        self.add_callback(AfterUpdate(self))
        if self._parent_term is not None:
            set_clipping(self, self._parent_term.loss)

    def _writer(self, contexts: Mapping[str, str]) -> Writer:
        return Writer(
            tokenizer=self._tokenizer,
            processor=self._processor,
            style=PromptStyle(arguments=dict(self.chat_template_kwargs)),  # pyright: ignore[reportArgumentType, reportCallIssue]
            max_length=getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            judge=judge_of(self.reward_funcs),
            templates=contexts,
        )

    @property
    def _processor(self) -> Any:
        return self.processing_class if hasattr(self.processing_class, "image_processor") else None

    def bind_teachers(self) -> None:
        """Under ZeRO-3, which spreads the weights when the training begins, lets teachers score through engines too.

        Local teachers are sharded as the student is; self teachers are made again from the student's shards.
        """
        if self._bound:
            return
        self._bound = True
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and hasattr(self.model_wrapped.optimizer, "check_grad_overflow"):
            self.model_wrapped.optimizer.check_grad_overflow = True  # in float32 DeepSpeed would not look
        if plugin is None or plugin.zero_stage != 3:
            return
        self.scorers = self._make_scorers(forward_module=self.model_wrapped)
        for scorer in self.scorers.values():
            for teacher in local_teachers(scorer.teacher):
                teacher.shard(partial(prepare_deepspeed, accelerator=self.accelerator))

    @contextmanager
    def generating(self) -> Iterator[Any]:
        """The student as `generate` wants it, whole on every process whatever the engine; all processes enter."""
        with unwrap_model_for_generation(
            self.model_wrapped,  # pyright: ignore[reportArgumentType]
            self.accelerator,
            gather_deepspeed3_params=self.args.ds3_gather_for_generation,
        ) as unwrapped:
            yield unwrapped

    # --- rollouts ---------------------------------------------------------------------------------------------------

    def _generate_single_turn(self, prompt_ids: Any, images: Any, *others: Any, **more: Any) -> Any:
        write = partial(super()._generate_single_turn, **more)
        online = self._online if self.model.training else None
        threshold = -math.inf if online is None else online.threshold(self.method_state, self.state.global_step)
        if online is None or threshold == -math.inf:
            return write(prompt_ids, images, *others)
        written, num_stopped = write_online(self, online, threshold, write, prompt_ids, images, others)
        counts = torch.tensor([[float(num_stopped), float(len(prompt_ids))]], device=self.accelerator.device)
        stopped, rows = self.accelerator.gather(counts).sum(0).tolist()
        self._note({"kl_trap/stopped": stopped / rows})
        return written

    def measure_rollouts(self, own: Sequence[Rollout]) -> tuple[RolloutBatch, dict[str, Any]]:
        """What is measured of responses, whether finished or not; their contexts see them alone."""
        return self._measure(as_batch(own, self._tokenizer.pad_token_id, self.accelerator.device), own, own, alone=True)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        with self.phases.timed("rewards"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._judged = Judged(inputs, prompts, completion_ids_list, rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        before_generation = random_state()
        with self.phases.counting(self.model, "generation", self.max_completion_length or 0):
            out = super()._generate_and_score_completions(inputs)
        judged, self._judged = self._judged, None
        assert judged is not None, "TRL calls _calculate_rewards once per generation batch"
        rank = self.accelerator.process_index
        size: Any = self.num_generations if self.model.training else self.num_generations_eval
        own = rollouts_of(out, judged, self.reward_weights, rank, size, self._tokenizer)
        everyone = gather_object(own) if self.accelerator.num_processes > 1 else own
        try:
            batch, scored = self._measure(out, own, everyone)
        except TeacherError:
            self._early = None
            self._keep(before_generation)
            raise
        if not self._has_shown and self.accelerator.is_main_process:
            for text in prompts_shown(self.scorers, own, everyone, self._tokenizer):
                self._say(text)
        self._has_shown = True
        whole = gather_batch(batch, self.accelerator.gather)
        before = self.method_state
        with self.phases.timed("credit"):
            assignment, state = self.objective.assign(whole, before)
        if self.model.training:
            self.method_state = state
        self._note(self.phases.take())
        self._note({name: total / count for name, (total, count) in assignment.metrics.items() if count})
        self._note(teacher_metrics(scored, batch.student_logprob_BT))
        self._show_advantages(assignment, whole)
        if (gap := largest_gap(out, batch.mask_BT)) is not None:
            self._note({"sync/max_abs_gap": float(self.accelerator.gather(gap[None]).max())})
        texts = self._demonstration_logprobs(out, batch) if self.watch is not None else None
        if self.watch is not None and self.accelerator.is_main_process and self.model.training:
            names = list(self.reward_func_names) if self.rewarded else []
            rewards = judged.rewards_NF if self.rewarded else None
            self.watch(
                StepWatch(batch.step, whole, assignment, self.objective, before, everyone, rewards, names, texts)
            )
        generation = own_generation(assignment, batch, scored, self.objective, rank)
        if self._parent_term is not None:
            credit = generation.assignment.terms[self.objective.terms.index(self._parent_term)]
            num_tokens = out["num_items_in_batch"] if self.loss_type == "dapo" else None
            generation.policy_value_BT = parent_advantage(credit, batch.mask_BT, num_tokens)
        if self.model.training:
            self._generation = generation
        else:
            self._evaluated = generation
        out["hybrid_row"] = torch.arange(len(own), device=out["completion_ids"].device)
        return out

    def _measure(
        self, out: Mapping[str, Any], own: Sequence[Rollout], everyone: Sequence[Rollout], *, alone: bool = False
    ) -> tuple[RolloutBatch, dict[str, Any]]:
        """Teacher scores and the student's own log-probs of the rollouts, joined.

        A teacher elsewhere works while the student does. With `alone` the other processes may not measure now.
        """
        agreed = (lambda ask: ask()) if alone else together
        mask_BT = out["completion_mask"].bool() & out.get("tool_mask", out["completion_mask"]).bool()
        width = mask_BT.shape[1]
        with self.phases.timed("teacher"):
            sampled = self.plan.sampled_views
            waiting = agreed(lambda: {v: asked(self.scorers[v], own, everyone, SAMPLED, width) for v in sampled})
            scored = agreed(lambda: score_views(self.plan, self.scorers, own, everyone, width))
        student = self._measured_student(out, mask_BT, scored, alone=alone) if self.plan.student else None
        asks = self.plan.support == "student"  # of the other sets, the teacher has told its part
        if asks and student is not None and student.top is not None and student.teacher_top_BTK is None:
            view = self.plan.distribution_view
            top = student.top
            scored |= agreed(lambda: {view: score_candidates(self.scorers[view], own, everyone, top, width)})
        with self.phases.timed("teacher"):
            scored |= agreed(lambda: {view: wait() for view, wait in waiting.items()})
        eos = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        truncated = [bool(r.completion_ids) and r.completion_ids[-1] not in eos for r in own]
        batch = join(
            plan=self.plan,
            own=own,
            mask_BT=mask_BT,
            truncated_B=torch.tensor(truncated, device=mask_BT.device),
            scored=scored,
            student=student,
            encode=lambda text: [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id],
            rewarded=self.rewarded,
            step=self.state.global_step,
            max_length=self.max_completion_length,
        )
        return batch, scored

    def _measured_student(
        self, out: Mapping[str, Any], mask_BT: Tensor, scored: Mapping[str, Any], *, alone: bool
    ) -> StudentMeasures:
        """The student's own measurements, by a forward that is made anyway where there is one."""
        old_BT = out.get("old_per_token_logps")
        if old_BT is not None and not self.plan.top_k and not {"entropies", "kl"} & self.plan.needs:
            return StudentMeasures(logprob_BT=old_BT.masked_fill(~mask_BT, 0))
        run, pieces = partial(self._run, self.model, out), self._pieces(out)
        scores = scored.get(self.plan.distribution_view)
        with self.phases.timed("student"):
            if not alone and old_BT is None and self._loss_sees_all:
                view = None if scores is None else to_view(scores, mask_BT)
                divergences = self.objective.divergences
                request = loss_request(out["completion_ids"], mask_BT, self.temperature, divergences, scores, view)
                (whole,) = pieces = even_pieces(mask_BT, out["prompt_ids"].shape[1], len(mask_BT))
                self._early = self._run(self.model_wrapped, out, whole, request)
                run = partial(answered, self._early, divergences)
            return measure_student(run, out["completion_ids"], mask_BT, self.plan, scores, self.temperature, pieces)

    @property
    def _loss_sees_all(self) -> bool:
        """Whether one forward of the loss takes the generation batch whole, so that credit can be read off it first."""
        spread = self.is_deepspeed_enabled or self.is_fsdp_enabled
        once = self.args.steps_per_generation == 1 and self.num_iterations == 1 and self._cutting is None
        return self.model.training and once and not spread and not self.plan.top_k and not self.aux_loss_enabled

    def _pieces(self, out: Mapping[str, Any]) -> list[Piece]:
        """What goes through the student at once where nothing is trained."""
        if self._cutting is None:
            size = self.args.per_device_train_batch_size
            return even_pieces(out["completion_mask"], out["prompt_ids"].shape[1], size)
        return self._cutting.pieces(out, together=self._cutting.is_collective)

    def _run(self, model: Any, out: Mapping[str, Any], piece: Piece, request: Request) -> dict[str, Tensor]:
        """One forward of the (wrapped) student that answers a request."""
        part = take(out, piece)
        ids = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        attention = torch.cat([part["prompt_mask"], part["completion_mask"]], 1)
        with self.accelerator.autocast():
            return model(input_ids=ids, attention_mask=attention, distribution=request, **image_inputs(part))

    # --- loss -------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if self._request is None and (self._early is None or not torch.is_grad_enabled()):
            result = self._plain_logps(model, *args, **kwargs)
            if self._pass is not None:
                self._pass["logprobs"] = result[0]
            return result
        request, self._request = self._request, None
        if self._early is None:
            images = {key: kwargs[key] for key in IMAGE_KEYS if kwargs.get(key) is not None}
            with self.accelerator.autocast():
                self._early = model(input_ids=args[0], attention_mask=args[1], distribution=request, **images)
        self._pass, self._early = self._early, None
        assert self._pass is not None
        return self._pass["logprobs"], self._pass["entropies"], None

    def _plain_logps(self, model: Any, ids: Tensor, attention: Tensor, width: int, *more: Any, **options: Any) -> Any:
        """TRL's log-probs and entropies of sampled tokens, by its head or by ours; cut where nothing is trained."""
        own_head = self._streams and model is not self.ref_model and not tiled(options)
        if not own_head and (self._cutting is None or torch.is_grad_enabled()):
            return super()._get_per_token_logps_and_entropies(model, ids, attention, width, *more, **options)
        forward: Any = partial(super()._get_per_token_logps_and_entropies, model)
        if own_head:
            forward = partial(sampled_logps, model, self.accelerator.autocast, self.temperature)
        if torch.is_grad_enabled():
            return forward(ids, attention, width, **options)
        return logps_of(self._pieces(halves(ids, attention, width) | options), forward, ids, attention, width, options)

    @property
    def _streams(self) -> bool:
        """Whether sampled tokens go through our head too: without a GPU, TRL's holds more than all logits at once."""
        whole = self.aux_loss_enabled or self.args.cast_lm_head_to_fp32
        return self.accelerator.device.type == "cpu" and not whole

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """TRL's, or piece after piece where a budget of tokens is set; see `hybrid.micro_batches`."""
        if self._cutting is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self._cutting.loss(model, inputs, self._generation_now())

    def _generation_now(self) -> Generation:
        generation = self._generation if self.model.training else self._evaluated
        assert generation is not None, "a generation batch was scored before its loss"
        return generation

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        generation, rows, width = self._generation_now(), inputs["hybrid_row"], inputs["completion_ids"].shape[1]
        batch, assignment = part_of(generation.batch, generation.assignment, self.objective, rows, width)
        self._pass = {}
        self._request = self._loss_request(inputs, batch, generation, rows)
        if self._early is not None:
            self._early = {name: value[rows] for name, value in self._early.items()}
        if generation.policy_value_BT is not None:
            advantages = generation.policy_value_BT[rows, :width]
        else:
            advantages = torch.zeros_like(batch.mask_BT, dtype=torch.float32)
        loss = super()._compute_loss(model, {**inputs, "advantages": advantages})
        measured, self._pass = self._pass, None
        texts_BU = None if batch.demonstration is None else self._demonstrations(model, inputs, batch.demonstration)
        student = student_pass(measured, self.objective.divergences, texts_BU)
        old_BT = inputs.get("old_per_token_logps")
        assignment = corrected(assignment, self.objective, inputs.get("importance_sampling_ratio"), self._parent_term)
        batch = replace(batch, student_logprob_BT=student.logprob_BT.detach() if old_BT is None else old_BT)
        own = self.objective.loss(assignment, batch, student)
        scale = self._micro_batches()
        self._note_terms(own)
        per_generation = self.args.steps_per_generation or 1
        self.phases.tell("update", self._step % per_generation + 1, per_generation)
        kept = own.kl + own.sft + (own.policy if self._parent_term is None else 0)
        return loss * inputs.get("hybrid_share", 1.0) + kept * self.accelerator.num_processes * scale

    def _micro_batches(self) -> float:
        """Micro-batches of a generation batch per micro-batch of an optimizer step; TRL's own rescaling (dapo)."""
        if not self.model.training:
            return 1.0
        return (self.args.steps_per_generation or 1) / self.current_gradient_accumulation_steps

    def _loss_request(
        self, inputs: Mapping[str, Any], batch: RolloutBatch, generation: Generation, rows: Tensor
    ) -> Request | None:
        """What the loss's forward must measure beside log-probs; None for TRL's own fused forward."""
        candidates = any(term.candidate_BTK is not None for term in generation.assignment.terms)
        if not self.objective.divergences and not candidates and (not self._streams or tiled(inputs)):
            return None
        scores = generation.scored.get(self.plan.distribution_view)
        view, own = batch.views.get(self.plan.distribution_view), batch.views.get("student")
        if view is not None and own is not None:  # the candidates are the student's where each side has its own list
            view = replace(view, top_ids_BTK=own.top_ids_BTK)
        ids, mask_BT, divergences = inputs["completion_ids"], batch.mask_BT, self.objective.divergences
        return loss_request(ids, mask_BT, self.temperature, divergences, scores, view, rows)

    @torch.no_grad()
    def _demonstration_logprobs(self, out: Mapping[str, Any], batch: RolloutBatch) -> Tensor | None:
        """The student's log-probs of the demonstrations of all processes' rows, for the record; None without any."""
        if batch.demonstration is None:
            return None
        width = longest(batch.demonstration.mask_BU, self.accelerator.gather)
        return self.accelerator.gather(padded(self._demonstrations(self.model, out, batch.demonstration), width))

    def _demonstrations(self, model: Any, inputs: Mapping[str, Any], texts: Demonstration) -> Tensor:
        """Log-probs of each row's demonstration after its prompt."""
        ids, attention, width, images = after_prompts(inputs, texts)
        return self._plain_logps(model, ids, attention, width, **images)[0]

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm)
        sharded = self.is_deepspeed_enabled  # DeepSpeed has made its update by now, or left it out
        bad = self._skips.judge(
            self.state.global_step + 1, float(norm), skipped=sharded and bool(self.optimizer.step_was_skipped)
        )
        if not sharded:
            self.optimizer._is_overflow = bad  # the learning rate then stands still too, as it does with DeepSpeed
        if bad and not sharded:
            model.zero_grad(set_to_none=True)  # an optimizer leaves weights without a gradient as they are
        self._metrics["train"]["gradient/skipped"].append(float(self._skips.total))
        return norm

    # --- what is noted ----------------------------------------------------------------------------------------------

    def _note(self, values: Mapping[str, float]) -> None:
        """Puts down numbers of this step, which TRL averages and logs."""
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _show_advantages(self, assignment: Assignment, whole: RolloutBatch) -> None:
        """A response's mean advantage stands in TRL's table of completions, where TRL has put that of its own."""
        advantage_BT = values(assignment, self.objective, ("policy",)).masked_fill(~whole.mask_BT, 0)
        shown_B = advantage_BT.sum(1) / whole.mask_BT.sum(1).clamp(min=1)
        shown = self._logs["advantages"]
        for _ in range(min(len(shown_B), len(shown))):
            shown.pop()
        shown.extend(shown_B.tolist())

    def _note_terms(self, own: Any) -> None:
        """The three sums over the whole generation batch, as `hybrid explain` would print them.

        Another loss type than dapo reduces the policy term otherwise, so that its sum is TRL's `loss` alone.
        """
        scale = self.args.steps_per_generation if self.model.training else 1
        parts = torch.stack([own.policy, own.kl, own.sft]).detach()
        policy, kl, sft = (self.accelerator.reduce(parts, reduction="sum") * scale).tolist()
        self._note({"loss/kl": kl, "loss/sft": sft} | ({"loss/policy": policy} if self.loss_type == "dapo" else {}))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> PlacedSampler:
        self.sampler = PlacedSampler(super()._get_train_sampler(dataset))
        return self.sampler

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root, step = Path(super()._get_output_dir(trial)), self.state.global_step
        with writing(root, step):
            staged = begin(root)
            self._staging = str(staged)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = ""
            folder = staged / f"checkpoint-{step}"
            folder.mkdir(exist_ok=True)
            write_state(self._own_state(), folder, self.accelerator.process_index)
            publish(folder, root, self.args.save_total_limit)

    def _keep(self, state: Mapping[str, Any]) -> None:
        """A checkpoint of this moment, between two updates, from which the step that could not be made comes again."""
        root, step = Path(super()._get_output_dir(None)), self.state.global_step
        starts_afresh = self._step % ((self.args.steps_per_generation or 1) * self.num_iterations) == 0
        if self.model.training and step and starts_afresh and not (root / f"checkpoint-{step}").exists():
            set_random_state(state)
            self._save_checkpoint(self.model_wrapped, None)
            self._say(f"the teacher failed; a checkpoint of step {step} is kept, from which --resume goes on")

    def _own_state(self) -> dict[str, Any]:
        """What a resumed run needs beside TRL's state; rollouts only where they will be used again."""
        assert self.args.steps_per_generation is not None
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return {
            "method_state": self.method_state,
            "micro_step": self._step,
            "skips": self._skips.total,
            "buffered": None if used_up else self._buffered_inputs,
            "generation": None if used_up else without_heads(self._generation),
            "teachers": {name: teacher.state_dict() for name, teacher in teachers_with_state(self.scorers).items()},
        }

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.bind_teachers()
        if checkpoint is None:
            return
        state = read_state(Path(checkpoint), self.accelerator.process_index, self.accelerator.device)
        self.method_state = state["method_state"]
        self._step = state["micro_step"]
        self._skips.total = state["skips"]
        self._buffered_inputs = state["buffered"]
        self._generation = with_heads(state["generation"], self.scorers)
        for name, teacher in teachers_with_state(self.scorers).items():
            teacher.load_state_dict(state["teachers"][name])

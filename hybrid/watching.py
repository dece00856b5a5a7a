"""What is written down while a training runs: metrics, rollouts, completions, checkpoints' whereabouts.

A trainer's callback for what TRL logs, and an observer of each generation batch for what only the objective knows.
"""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from transformers import TrainerCallback

from hybrid.checkpoints import best_value, mark_best
from hybrid.errors import DataError
from hybrid.generation import StepWatch
from hybrid.objective.objective import values
from hybrid.progress import Bars, note_of
from hybrid.record_writer import Texts, record_lines, write_records
from hybrid.together import from_main

RENAMED = {
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/truncated",
    "num_tokens": "tokens/total",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "step_time": "time/step_s",
    "teacher/positions": "teacher_tokens/step",
}
"""TRL's names, in the words of this project's runs."""

LEFT_OUT = frozenset({"epoch", "total_flos", "train_loss", "train_runtime"})
"""What TRL logs and no comparison reads."""

FLUSH_S = 5.0
"""Seconds that the tracking gets before a checkpoint, so that a kill after it loses no point."""


class Watch(TrainerCallback):
    """Sends what a training logs to the tracker and the bars, and evaluates when it is time.

    Attributes:
      latest: the last value of every metric.
    """

    def __init__(
        self,
        *,
        tracker: Any,
        bars: Bars,
        label: str,
        responses_per_step: int,
        evaluate: Callable[[], Mapping[str, float]] | None,
        every: int,
        before: Callable[[], Mapping[str, float]],
        folder: Path | None = None,
    ) -> None:
        """Takes where to write.

        Args:
          tracker: of the run.
          bars: on the screen.
          label: of the training.
          responses_per_step: for the running total of rollouts.
          evaluate: held-out metrics of the present student; None for none.
          every: steps between two evaluations; 0 for none in between.
          before: measures the start, or finds its metrics; called when the training begins.
          folder: of the training, where its best checkpoint is marked; None marks none.
        """
        self.tracker, self.bars, self.label = tracker, bars, label
        self.responses_per_step, self.evaluate, self.every = responses_per_step, evaluate, every
        self.before = before
        self.latest: dict[str, float] = {}
        self.evaluated_at = 0
        self.folder = folder
        self._best: tuple[str, float] | None = None
        self._paused_s = 0.0
        self._teacher_tokens = 0.0
        self._began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Notes the start's accuracy as step 0, and starts the clock."""
        self.latest = dict(self.before())
        self._began, self._paused_s = time.perf_counter(), 0.0
        if state.global_step == 0 and self.latest:
            self.tracker.metrics(self.latest, 0)
        for entry in state.log_history:  # a resumed run counts on
            self._teacher_tokens += float(entry.get("teacher/positions") or 0.0)
            self._paused_s -= float(entry.get("step_time") or 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """One point per step: what TRL logged, running totals, time and memory."""
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        named = {RENAMED.get(name, name): value for name, value in logs.items() if name not in LEFT_OUT}
        self._teacher_tokens += float(named.pop("teacher_tokens/step", 0.0) or 0.0)
        parts = sum(float(value) for name, value in named.items() if name.startswith("time/") and name != "time/step_s")
        if "time/step_s" in named:
            named["time/update_s"] = max(0.0, float(named["time/step_s"]) - parts)
        named["rollouts/total"] = state.global_step * self.responses_per_step
        named["teacher_tokens/total"] = self._teacher_tokens
        named["time/total_s"] = time.perf_counter() - self._began - self._paused_s
        named |= memory_gb()
        self.latest |= {name: value for name, value in named.items() if isinstance(value, int | float)}
        self.tracker.metrics(named, state.global_step)
        if control.should_save:  # a run that is resumed from this checkpoint does not measure these steps again
            self.tracker.flush(FLUSH_S)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the bar, and evaluates every so often; that time is not the training's."""
        self.bars.advance(self.label, state.global_step, state.max_steps, note_of(self.latest))
        last = state.global_step == state.max_steps
        if self.evaluate is not None and self.every and (state.global_step % self.every == 0 or last):
            metrics = self.measure(state.global_step)
            self._best = self.better(metrics)
            if self._best is not None:
                control.should_save = True

    def better(self, metrics: Mapping[str, float]) -> tuple[str, float] | None:
        """Name and value of the held-out accuracy, where it is above that of the best checkpoint so far."""
        name = next((name for name in metrics if name.startswith("eval/avg_at")), None)
        if self.folder is None or name is None:
            return None
        folder = self.folder
        before = from_main(lambda: best_value(folder))
        return (name, metrics[name]) if before is None or metrics[name] > before else None

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Marks a checkpoint that is the best so far."""
        if self._best is not None and self.folder is not None and state.is_world_process_zero:
            mark_best(self.folder / f"checkpoint-{state.global_step}", *self._best)
        self._best = None

    def measure(self, step: int) -> Mapping[str, float]:
        """Evaluates the present student, unless this step has been evaluated already."""
        if self.evaluate is not None and self.evaluated_at != step:
            began = time.perf_counter()
            metrics = self.evaluate()
            self._paused_s += time.perf_counter() - began
            self.latest |= metrics
            self.evaluated_at = step
            self.tracker.metrics(metrics, step)
        return {name: value for name, value in self.latest.items() if name.startswith("eval/")}


def memory_gb() -> dict[str, float]:
    """Peak memory of this process in GB, and of its GPU where there is one."""
    found = {"memory/cpu_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if torch.cuda.is_available():
        found["memory/gpu_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


class Recorder:
    """Writes every generation batch as JSON Lines, and now and then a table of completions."""

    def __init__(
        self, *, path: Path | None, tracker: Any, tokenizer: Any, table_every: int, tell: Callable[[str], None]
    ) -> None:
        """Takes where to write.

        Args:
          path: of the rollouts' file; None for none.
          tracker: of the run, for tables.
          tokenizer: of the student, for the text of single tokens.
          table_every: steps between two tables; 0 for none.
          tell: given a line about what it had to leave out.
        """
        self.path, self.tracker, self.tokenizer, self.table_every, self.tell = (
            path,
            tracker,
            tokenizer,
            table_every,
            tell,
        )

    def __call__(self, watch: StepWatch) -> None:
        """Writes one generation batch."""
        if self.path is not None:
            try:
                write_records(self.path, rollout_lines(watch, self.tokenizer))
            except OSError as error:
                raise DataError(
                    f"the rollouts could not be written to {self.path} ({error.strerror}); make room or mend the "
                    "folder, and go on with --resume; tracking.record_rollouts: false writes none"
                ) from error
        if self.table_every and watch.step % self.table_every == 0:
            self.tracker.table(f"completions/step_{watch.step:06d}.json", self.rows(watch))

    def rows(self, watch: StepWatch) -> Sequence[Mapping[str, Any]]:
        """One row per completion for MLflow's table view."""
        teacher = watch.batch.views.get("teacher")
        rows = []
        for row, rollout in enumerate(watch.rollouts):
            entry: dict[str, Any] = {
                "step": watch.step,
                "prompt": shown(rollout.prompt),
                "completion": rollout.text,
                "reward": None if rollout.reward != rollout.reward else rollout.reward,
            }
            if watch.rewards is not None:
                scores = watch.rewards[row].tolist()
                entry |= dict(zip(watch.reward_names, scores, strict=True))
            if teacher is not None and watch.batch.student_logprob_BT is not None:
                gap_T = (teacher.logprob_BT[row] - watch.batch.student_logprob_BT[row])[teacher.valid_BT[row]]
                entry["teacher_gap"] = float(gap_T.mean()) if len(gap_T) else None
                entry["teacher_gap_per_token"] = orjson.dumps([round(g, 4) for g in gap_T.tolist()]).decode()
            rows.append(entry)
        return rows


def rollout_lines(watch: StepWatch, tokenizer: Any) -> Sequence[str]:
    """Record lines (design section 6), each with its step and the credit that the objective gave."""
    rewards: dict[str, list[float | None]] = {}
    if watch.rewards is not None:
        for place, name in enumerate(watch.reward_names):
            rewards[name] = [None if v != v else v for v in watch.rewards[:, place].tolist()]
    advantage_BT = values(watch.assignment, watch.objective, ("policy",))
    weight_BT = values(watch.assignment, watch.objective, ("kl",))
    texts = Texts(
        prompts=[shown(r.prompt) for r in watch.rollouts],
        completions=[r.text for r in watch.rollouts],
        tokens=[[tokenizer.decode([token]) for token in r.completion_ids] for r in watch.rollouts],
        rewards=rewards,
    )
    written = record_lines(
        watch.batch,
        prompt_ids=[f"{watch.step}/{r.group}" for r in watch.rollouts],
        response_ids=[f"{watch.step}/{r.group}/{r.position}" for r in watch.rollouts],
        token_ids=[r.completion_ids for r in watch.rollouts],
        texts=texts,
        demonstration_logprob_BU=watch.demonstration_logprob_BU,
    )
    kept_BT = torch.stack([term.kept_BT for term in watch.assignment.terms]).any(0)
    lines = []
    for row, line in enumerate(written):
        length = len(watch.rollouts[row].completion_ids)
        credit = {
            "step": watch.step,
            "advantages": advantage_BT[row, :length].tolist(),
            "kl_weights": weight_BT[row, :length].tolist(),
            "kept": kept_BT[row, :length].int().tolist(),
        }
        lines.append(orjson.dumps(orjson.loads(line) | credit).decode())
    return lines


def shown(prompt: Any) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {content_text(message['content'])}" for message in prompt)


def content_text(content: Any) -> str:
    """What a message says, with a mark for each picture."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)

"""What follows the student's updates: the teachers that are made of it, and the order of the prompts."""

from typing import Any

from transformers import TrainerCallback


class AfterUpdate(TrainerCallback):
    """Tells self teachers (snapshots, running means) that the student has moved."""

    def __init__(self, trainer: Any) -> None:
        """Takes the `HybridTrainer` whose teachers follow the student."""
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The student is wrapped now, so teachers that share its weights can be."""
        self.trainer.bind_teachers()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The prompts of this epoch stand in the order that it has in a run without a break."""
        self.trainer.sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each optimizer update."""
        for teacher in {id(scorer.teacher): scorer.teacher for scorer in self.trainer.scorers.values()}.values():
            if hasattr(teacher, "after_update"):
                teacher.after_update(state.global_step)

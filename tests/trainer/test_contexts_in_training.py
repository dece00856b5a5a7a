"""The privileged prompts of a training: their words, and who counts as right in them."""

import pytest
from datasets import Dataset

from hybrid.methods import method_of
from hybrid.rewards.config import ExactConfig
from hybrid.trainer import HybridConfig, HybridTrainer
from tests.tiny_models import model, tokenizer

PROMPTS = ["a=", "b=", "c=", "d="] * 6


class Seen(HybridTrainer):
    """Keeps the texts of the prompts under which each view was scored."""

    def _measure(self, out, own, everyone, **more):
        self.texts = {
            view: [
                None if prompt is None else self._tokenizer.decode(prompt.prompt_ids)
                for prompt in scorer.context(own, everyone)
            ]
            for view, scorer in self.scorers.items()
        }
        self.own = own
        return super()._measure(out, own, everyone, **more)


def train(folder, method, rewards, **more):
    args = HybridConfig(
        output_dir=str(folder), max_steps=1, max_completion_length=4, seed=3, disable_tqdm=True, save_strategy="no",
        use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
    )  # fmt: skip
    trainer = Seen(
        model(0), method=method_of(method), reward_funcs=rewards, args=args, processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "answer": [p[0] for p in PROMPTS]}), **more,
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_students_contexts_have_the_words_that_it_is_given(tmp_path):
    reward = ExactConfig(pattern="([a-z])").build()
    trainer = train(tmp_path, {"name": "sipo"}, [reward], contexts={"reference_answer": "{answer}+{prompt}"})
    shown = [text for text in trainer.texts["right"] if text is not None]
    assert shown
    assert all(text.replace(" ", "")[1:] == "+" + text.replace(" ", "")[0] + "=" for text in shown)


class Half:
    """Gives every response the same reward and reads its first letter as its answer."""

    __name__ = "half"

    def __call__(self, completions, **columns):
        return [0.5 for _ in completions]

    def judged_answer(self, text):
        return "z"


@pytest.mark.parametrize(("thr", "is_right"), [(0.5, True), (0.6, False)])
def test_the_methods_threshold_says_who_is_right_in_a_contrast(tmp_path, thr, is_right):
    method = {"name": "sipo", "thr": thr, "contrast_context": "answer"}
    trainer = train(tmp_path, method, [Half()], contexts={"reference_answer": "{answer}+{prompt}"})
    wrong = [None if text is None else text.replace(" ", "")[0] for text in trainer.texts["wrong"]]
    assert wrong == ([None] * 8 if is_right else ["z"] * 8)

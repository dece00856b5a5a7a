"""The tiny vision task: its figures, its data set, its models, and an experiment on it from YAML."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText

from hybrid import tiny_vision
from hybrid.data import DataConfig, check_prompt_lengths, load_prompts
from hybrid.errors import ConfigError, DataError, HybridError
from hybrid.evaluate import Sampling, evaluate
from hybrid.pictures import encode_prompts, pictures_of, with_pictures
from hybrid.read_config import read_experiment
from hybrid.rewards.config import ExactConfig
from hybrid.sources import BUILDERS, model_folder
from hybrid.tiny_figures import Figure, draw_figure, vision_dataset
from hybrid.tiny_vision import RECIPES, ensure_tiny_vision, vision_processor
from hybrid.training import load_student
from teachers.contexts import degraded_image
from teachers.local import LocalTeacher
from teachers.processors import PictureProcessor, load_processor
from teachers.protocol import Row

ANSWER = r"#(\d+)$"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache whose student has seen ten batches: quick to make, good for nothing."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        hasty = replace(RECIPES["count_dots", "student"], target=0.0, batch_size=4)
        both = {("count_dots", role): replace(hasty, role=role) for role in ("student", "teacher")}
        patch.setattr(tiny_vision, "RECIPES", both)
        patch.setattr(tiny_vision, "VALIDATION_ROWS", 4)
        patch.setenv("HYBRID_CACHE", str(folder))
        yield folder


def test_a_figure_shows_what_it_says():
    figure = Figure(dots=((4, 4), (12, 20)), digit=7, corner=(20, 8))
    dark = np.asarray(figure.draw())[:, :, 0] < 128
    assert dark.shape == (32, 32)
    assert dark[4, 4]
    assert dark[20, 12]
    assert not dark[:, :16][12:16].any()
    assert dark[8, 23]  # the top stroke, and of the upright ones only those on the right
    assert dark[18, 27]
    assert not dark[12:22, 19:22].any()
    assert (figure.working, figure.answer) == ("2+7#9", "9")


def test_every_digit_looks_different():
    drawn = {Figure(dots=(), digit=digit, corner=(20, 8)).draw().tobytes() for digit in range(10)}
    assert len(drawn) == 10


def test_a_degraded_figure_keeps_its_size_and_loses_its_digit():
    sharp = [np.asarray(Figure(dots=(), digit=digit, corner=(20, 8)).draw(), dtype=float) for digit in (6, 9)]
    grey = [np.asarray(degraded_image(Image.fromarray(x.astype(np.uint8)), ratio=0.1), dtype=float) for x in sharp]
    assert grey[0].shape == sharp[0].shape
    assert len(np.unique(grey[0])) <= 9  # three by three blocks
    assert np.abs(grey[0] - grey[1]).max() < np.abs(sharp[0] - sharp[1]).max() / 3


def test_the_data_set_is_what_it_says_and_its_splits_are_apart():
    rows = vision_dataset("count_dots", "train", 40, 3)
    assert rows.column_names == ["prompt", "image", "answer", "reference"]
    pairs = zip(rows["reference"], rows["answer"], strict=True)
    assert all(working.endswith(f"#{answer}") for working, answer in pairs)
    assert rows["reference"][:] == vision_dataset("count_dots", "train", 40, 3)["reference"][:]
    splits = [vision_dataset("count_dots", split, 60, 3) for split in ("train", "eval")]
    seen = [{picture.tobytes() for picture in split["image"]} for split in splits]
    assert [len(pictures) for pictures in seen] == [60, 60]
    assert not seen[0] & seen[1]


def test_what_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="there is count_dots"):
        vision_dataset("count_stars", "train", 1, 0)
    with pytest.raises(ConfigError, match="there are train, validation and eval"):
        vision_dataset("count_dots", "test", 1, 0)
    with pytest.raises(DataError, match="at least 1; got 0"):
        vision_dataset("count_dots", "train", 0, 0)
    with pytest.raises(ConfigError, match="count_dots, as student and teacher"):
        ensure_tiny_vision("count_stars", "student")


def test_a_model_is_made_once_and_read_by_the_ordinary_classes(cache):
    told = []
    folder = ensure_tiny_vision("count_dots", "student", progress=lambda *what: told.append(what))
    assert told[-1] == ("tiny student for count_dots", 800, 800)
    assert ensure_tiny_vision("count_dots", "student", progress=lambda *what: told.append(None)) == folder
    assert None not in told
    assert json.loads((folder / "tiny.json").read_text())["steps"] == 10
    assert isinstance(load_processor(folder), PictureProcessor)
    row = Row(
        prompt_ids=tuple(encode_prompts(load_processor(folder), [chat_row()], {})["input_ids"][0].tolist()),
        completion_ids=(20, 21, 2),
        images=(chat_row()["image"],),
    )
    teacher = LocalTeacher.load(folder)
    assert teacher.score([row]).valid_BT.all()
    assert type(AutoModelForImageTextToText.from_pretrained(folder)).__name__ == "Qwen3VLForConditionalGeneration"


def test_a_target_that_is_not_reached_is_an_error(cache, monkeypatch):
    recipe = replace(RECIPES["count_dots", "student"], target=1.1, max_steps=10, batch_size=4)
    monkeypatch.setattr(tiny_vision, "RECIPES", {("count_dots", "student"): recipe})
    with pytest.raises(HybridError, match=r"reached 0\.\d+ of its target 1\.1 in 10 steps"):
        ensure_tiny_vision("count_dots", "student")


def chat_row():
    figure = draw_figure("train", random.Random(0))
    return {"prompt": [{"role": "user", "content": "dots+digit="}], "image": figure.draw()}


def test_prompts_with_pictures_need_a_chat():
    source = DataConfig(source="tiny:count_dots", limit=4, chat=True)
    rows = load_prompts(source, seed=0, builders=BUILDERS)
    assert rows[0]["image"].size == (32, 32)
    assert check_prompt_lengths(rows, vision_processor(), 40) == 29  # 16 of the picture, its 2 marks, 11 of the text
    with pytest.raises(DataError, match=r"need data\.chat: true"):
        load_prompts(DataConfig(source="tiny:count_dots", limit=4), seed=0, builders=BUILDERS)


def test_a_picture_stands_before_the_words_of_its_user():
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "dots="}]
    picture = chat_row()["image"]
    parts = with_pictures(chat, [picture, picture])[1]["content"]
    assert parts == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "dots="}]
    assert with_pictures(chat, []) == chat
    placed = [{"role": "user", "content": [{"type": "image"}]}]
    assert with_pictures(placed, [picture]) == placed
    with pytest.raises(DataError, match="has 1 places for pictures, and its row has 2"):
        with_pictures(placed, [picture, picture])
    assert pictures_of({"image": None}) == pictures_of({"images": []}) == pictures_of({}) == []
    with pytest.raises(DataError, match="the student reads none"):
        encode_prompts(vision_processor().tokenizer, [chat_row()], {})


def test_the_student_of_an_experiment_is_evaluated_on_figures(cache, tmp_path):
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "name: figures\nstudent: {model: 'tiny:count_dots'}\nteacher: {model: 'tiny:count_dots'}\n"
        "method: {name: va_opd}\ndata: {source: 'tiny:count_dots', chat: true}\n"
        f"rewards: [{{name: exact, pattern: '{ANSWER}'}}]\n"
    )
    config = read_experiment(file)
    model, processor = load_student(config, model_folder("tiny:count_dots", "student"))
    assert isinstance(processor, PictureProcessor)
    rows = load_prompts(config.data, seed=0, builders=BUILDERS).select(range(3))
    sampling = Sampling(samples=2, max_completion_length=6)
    found = [evaluate(model, processor, rows, [ExactConfig(pattern=ANSWER).build()], sampling) for _ in range(2)]
    assert found[0].length_PK.shape == (3, 2)
    assert found[0].texts == found[1].texts

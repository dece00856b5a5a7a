"""A teacher that reads along says what it would say about the whole response."""

import random

import pytest
import torch
from torch.testing import assert_close

from hybrid.tiny_figures import draw_figure
from hybrid.tiny_vision import vision_processor
from teachers.local import LocalTeacher
from teachers.protocol import Row
from tests.tiny_models import model
from tests.tiny_vision_models import FAMILIES, vision_model


def logprobs_alongside(teacher, rows):
    """[R, T] of completions of one length, token by token."""
    reader = teacher.alongside()
    completion_RT = torch.tensor([row.completion_ids for row in rows])
    logits = reader.begin(rows)
    found = []
    for token_R in completion_RT.T:
        found.append(torch.log_softmax(logits, -1).gather(1, token_R[:, None])[:, 0])
        logits = reader.follow(token_R)
    return torch.stack(found, 1)


def test_text_token_by_token_equals_whole_responses():
    teacher = LocalTeacher(model(1))
    rows = [
        Row(prompt_ids=(3, 4, 5, 6, 7), completion_ids=(8, 9, 10, 11, 12, 13)),
        Row(prompt_ids=(5,), completion_ids=(8, 9, 2, 3, 4, 5)),
        Row(prompt_ids=(9, 9), completion_ids=(1, 9, 2, 3, 30, 31)),
    ]
    assert_close(logprobs_alongside(teacher, rows), teacher.score(rows).logprob_BT, rtol=0, atol=1e-5)
    assert_close(logprobs_alongside(teacher, rows[1:2]), teacher.score(rows[1:2]).logprob_BT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_token_by_token_equal_whole_responses(family):
    processor = vision_processor()
    teacher = LocalTeacher(vision_model(family, 1), processor.tokenizer, processor=processor)
    wide = draw_figure("train", random.Random(0)).draw().resize((48, 24))
    square = draw_figure("train", random.Random(1)).draw()
    image = processor.image_token_id
    rows = [
        Row(prompt_ids=(259, *[image] * 18, 260, 40), completion_ids=(50, 51, 52, 53), images=(wide,)),
        Row(
            prompt_ids=(259, *[image] * 16, 260, 259, *[image] * 18, 260, 41, 42, 43),
            completion_ids=(50, 61, 62, 63),
            images=(square, wide),
        ),
        Row(prompt_ids=(40, 41), completion_ids=(70, 71, 52, 53)),
    ]
    for chosen in (rows, rows[:1], rows[2:]):
        want = teacher.score(chosen).logprob_BT
        assert_close(logprobs_alongside(teacher, chosen), want, rtol=0, atol=1e-4)

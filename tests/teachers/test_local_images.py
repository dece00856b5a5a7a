from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from teachers.contexts import degraded_image
from teachers.errors import TeacherCannot, TeacherMismatch
from teachers.local import LocalTeacher
from teachers.protocol import Row

IMAGE, START, END = 60, 62, 63


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.4,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def processor():
    # the parts of a processor that are needed; 8 x 8 pixels become one placeholder
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096
    )
    return SimpleNamespace(image_processor=image_processor)


def picture(seed, height, width):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def rows():
    wide, square = picture(0, 16, 32), picture(1, 16, 16)
    return [
        Row(prompt_ids=(3, START, *[IMAGE] * 8, END, 4), completion_ids=(5, 6), images=(wide,)),
        Row(prompt_ids=(3, 4), completion_ids=(5, 6, 7)),
        Row(
            prompt_ids=(3, START, *[IMAGE] * 4, END, START, *[IMAGE] * 8, END, 4),
            completion_ids=(5, 6),
            images=(square, wide),
        ),
    ]


def test_rows_with_images_score_as_the_model_itself_does(model, processor, rows):
    scores = LocalTeacher(model, processor=processor).score(rows)
    for i, row in enumerate(rows):
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
        seen = processor.image_processor(images=list(row.images), return_tensors="pt") if row.images else {}
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **seen).logits[0]
        for t, token in enumerate(row.completion_ids):
            expected = torch.log_softmax(logits[len(row.prompt_ids) + t - 1], -1)[token]
            assert scores.logprob_BT[i, t].item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_batch_of_mixed_rows_equals_each_row_alone(model, processor, rows):
    teacher = LocalTeacher(model, processor=processor)
    together = teacher.score(rows).logprob_BT
    for i, row in enumerate(rows):
        alone = teacher.score([row]).logprob_BT[0]
        assert_close(together[i, : len(alone)], alone, rtol=0, atol=1e-5)


def test_a_degraded_image_keeps_its_tokens_and_changes_the_scores(model, processor, rows):
    teacher = LocalTeacher(model, processor=processor)
    blurred = replace(rows[0], images=(degraded_image(rows[0].images[0], ratio=0.1),))
    full, degraded = teacher.score([rows[0]]).logprob_BT, teacher.score([blurred]).logprob_BT
    assert (full - degraded).abs().max() > 0.01


def test_placeholders_that_do_not_fit_the_images_are_refused_with_both_numbers(model, processor, rows):
    teacher = LocalTeacher(model, processor=processor)
    with pytest.raises(TeacherMismatch, match=r"has 8 image placeholders \(id 60\), and its 1 images need 4"):
        teacher.score([replace(rows[0], images=(picture(0, 16, 16),))])
    with pytest.raises(TeacherMismatch, match=r"has 8 image placeholders .* and its 0 images need 0"):
        teacher.score([replace(rows[0], images=())])


def test_a_processor_that_cannot_prepare_images_is_refused(model):
    with pytest.raises(TeacherCannot, match="has no image_processor"):
        LocalTeacher(model, processor=SimpleNamespace())
    other = SimpleNamespace(image_processor=lambda images, return_tensors: {"pixel_values": torch.zeros(1)})
    row = Row(prompt_ids=(3, START, IMAGE, END), completion_ids=(5,), images=(picture(0, 8, 8),))
    with pytest.raises(TeacherCannot, match=r"answers with \['pixel_values'\]"):
        LocalTeacher(model, processor=other).score([row])

"""Random vision-language models of three Qwen-VL families, and prompts with pictures of several sizes and numbers."""

from datasets import Dataset, Features, Image, List, Value
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.trainer_utils import set_seed

from hybrid.tiny_figures import draw_figure
from hybrid.tiny_vision import RECIPES, architecture

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def vision_model(family: str, seed: int):
    """Weights wide enough that every token hangs on its picture."""
    set_seed(seed)
    newest = architecture(RECIPES["count_dots", "student"])
    settings = newest.to_dict()
    text = settings["text_config"] | {"initializer_range": 0.3}
    vision = settings["vision_config"] | {"initializer_range": 0.3}
    rope = {"rope_type": "default", "rope_theta": 30.0, "mrope_section": [8, 4, 4]}
    others = {key: value for key, value in settings.items() if key.endswith("token_id")}
    others |= {"tie_word_embeddings": True, "dtype": "float32"}
    if family == "qwen3_vl":
        text["rope_parameters"] = rope | {"mrope_interleaved": True}
        return Qwen3VLForConditionalGeneration(type(newest)(text_config=text, vision_config=vision, **others))
    text = {key: value for key, value in text.items() if key not in ("head_dim", "model_type")}
    text["rope_parameters"] = rope
    shared = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "initializer_range")
    kept = {key: vision[key] for key in shared}
    if family == "qwen2_vl":
        kept |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=kept, **others))
    kept |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": text["hidden_size"]}
    kept |= {"window_size": 16, "fullatt_block_indexes": []}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=kept, **others))


def pictured_prompts(num: int = 24) -> Dataset:
    """Chats with one, two or no pictures, of two sizes, behind texts of several lengths."""
    import random

    rng = random.Random(0)
    rows: dict[str, list] = {"prompt": [], "images": [], "answer": [], "demonstration": [], "teacher_accuracy": []}
    for row in range(num):
        pictures = [draw_figure("train", rng).draw() for _ in range((1, 2, 1, 0)[row % 4])]
        if row % 3 == 0:
            pictures = [picture.resize((48, 24)) for picture in pictures]
        rows["prompt"].append([{"role": "user", "content": "dots" * (row % 3) + "="}])
        rows["images"].append(pictures)
        rows["answer"].append("a")
        rows["demonstration"].append("3+4#7" if row % 2 else None)
        rows["teacher_accuracy"].append(row / num)
    message = {"role": Value("string"), "content": Value("string")}
    features = Features(
        {
            "prompt": List(message),
            "images": List(Image()),
            "answer": Value("string"),
            "demonstration": Value("string"),
            "teacher_accuracy": Value("float64"),
        }
    )
    return Dataset.from_dict(rows, features=features)

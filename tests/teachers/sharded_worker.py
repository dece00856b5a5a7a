"""Run by torchrun, by `test_sharded_teachers`: teachers under DeepSpeed ZeRO-3, with more rows on one rank."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from teachers.local import LocalTeacher
from teachers.protocol import Row, Want
from teachers.scoring import ScoreSettings
from teachers.selves import EmaTeacher, LiveTeacher, SnapshotTeacher

ROWS = [
    Row(prompt_ids=(3, 4, 5), completion_ids=(8, 9, 10)),
    Row(prompt_ids=(11, 12), completion_ids=(13,)),
    Row(prompt_ids=(7,), completion_ids=(1, 2, 3, 4, 5)),
]


def build():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def worst(first, second):
    return float((first - second).detach().abs().max())


def main(folder):
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    rows = ROWS if rank == 0 else ROWS[:1]
    at_start = LocalTeacher(build()).score(rows).logprob_BT
    zero = {
        "train_micro_batch_size_per_gpu": 1,
        # some weights stay whole on every rank, the others do not
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
        "zero_allow_untested_optimizer": True,
    }
    model = build()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), config=zero
    )
    settings = ScoreSettings(batch_size=1, chunk=2)
    live = LiveTeacher(model, forward_module=engine, settings=settings)
    snapshot = SnapshotTeacher(model, every=2, forward_module=engine, settings=settings)
    average = EmaTeacher(model, decay=0.5, forward_module=engine, settings=settings)

    def step():
        ids = torch.tensor([[3, 4, 5, 8, 9, 10]])
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    found = {}
    scores = live.score(rows, Want(distribution=True))
    assert scores.head is not None
    assert scores.hidden_BTH is not None
    found["live at start"] = worst(scores.logprob_BT, at_start)
    step()
    average.after_update(1)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        mean = build()
        for ours, theirs in zip(mean.parameters(), model.parameters(), strict=True):
            ours.data = 0.5 * ours.data + 0.5 * theirs.detach()
    found["average"] = worst(average.score(rows).logprob_BT, LocalTeacher(mean).score(rows).logprob_BT)
    step()
    now = live.score(rows).logprob_BT
    found["moved"] = worst(now, at_start)
    found["snapshot at start"] = worst(snapshot.score(rows).logprob_BT, at_start)
    found["student given back"] = worst(live.score(rows).logprob_BT, now)
    snapshot.after_update(2)
    found["snapshot at two"] = worst(snapshot.score(rows).logprob_BT, now)
    kept = torch.log_softmax(scores.head(scores.hidden_BTH[0, :3]), -1)[torch.arange(3), torch.tensor([8, 9, 10])]
    found["head kept"] = worst(kept, scores.logprob_BT[0, :3])
    found["shard"] = snapshot.state_dict()["shard"]

    frozen = build()
    sharded, *_ = deepspeed.initialize(model=frozen, config=zero)
    teacher = LocalTeacher(frozen, forward_module=sharded, batch_size=1, chunk=2)
    found["frozen"] = worst(teacher.score(rows, Want(top_k=2)).logprob_BT, at_start)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""Peak memory of the losses that read a whole vocabulary: our streamed head beside the same arithmetic written densely.

    python -m benchmarks.memory                      # 4 x 1,024 tokens, hidden 1,024, vocabulary 151,936; wants 20 GB
    python -m benchmarks.memory --tokens 256         # a quarter of the tokens, in 6 GB

Each line is a forward and backward through the student's output head, against a local teacher's hidden states and
frozen head where there is a divergence. Each number comes from a process of its own: the largest resident set after the
step (getrusage) less the resident set before it, when weights, hidden states and libraries are loaded and a small step
has run. The gradient of the student's head, 0.62 GB at full size, is made in the step and counts on both sides. Values
and the gradient of the hidden states are compared as well. The last line is TRL's own head for sampled tokens, which
`HybridTrainer` uses on a GPU.

Shape letters: N tokens (flat), H hidden width, V vocabulary, K support.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from hybrid.distributions import Request, measure
from hybrid.heads import Head
from hybrid.objective.divergence import with_tail
from hybrid.objective.losses import Divergence

TRL_CHUNK = 32_768
"""Columns of the vocabulary that TRL's head takes at once."""

SUPPORT = 64
DENSE_COPIES = 5.5
"""Tensors [N, V] that the dense arithmetic may hold at once, for the check that they fit."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is computed."""

    rows: int = 4
    tokens: int = 1024
    hidden: int = 1024
    vocab: int = 151_936

    @property
    def dense_bytes(self) -> int:
        """One tensor [N, V] in float32."""
        return 4 * self.rows * self.tokens * self.vocab


@dataclass(frozen=True)
class Inputs:
    """What both sides are given: hidden states, heads, sampled ids, and the teacher's top-k."""

    hidden_NH: Tensor
    teacher_NH: Tensor
    student: nn.Linear
    teacher: nn.Linear
    target_N: Tensor
    support_NK: Tensor
    support_log_NK: Tensor

    @staticmethod
    def make(sizes: Sizes) -> "Inputs":
        """Random ones, the same in every process; logits spread by about 2 nats, as those of a trained model may."""
        torch.manual_seed(0)
        num = sizes.rows * sizes.tokens
        hidden_NH = torch.randn(num, sizes.hidden)
        student, teacher = (nn.Linear(sizes.hidden, sizes.vocab, bias=False) for _ in range(2))
        for head in (student, teacher):
            nn.init.normal_(head.weight, std=2 / sizes.hidden**0.5)
        teacher.requires_grad_(False)
        support_log_NK = torch.log_softmax(torch.randn(num, SUPPORT), -1) - 0.1  # a tail of a tenth
        support_NK = torch.randint(sizes.vocab - SUPPORT, (num, 1)) + torch.arange(SUPPORT)
        target_N = torch.randint(sizes.vocab, (num,))
        near_NH = hidden_NH + 0.3 * torch.randn(num, sizes.hidden)
        return Inputs(hidden_NH.requires_grad_(), near_NH, student, teacher, target_N, support_NK, support_log_NK)

    def first(self, num: int) -> "Inputs":
        """The first tokens alone."""
        return Inputs(
            self.hidden_NH[:num].detach().requires_grad_(),
            self.teacher_NH[:num],
            self.student,
            self.teacher,
            self.target_N[:num],
            self.support_NK[:num],
            self.support_log_NK[:num],
        )


def dense_log(hidden_NH: Tensor, head: nn.Linear) -> Tensor:
    """Log-probs [N, V], all at once."""
    return torch.log_softmax(linear(hidden_NH, head.weight), -1)


def dense_sampled(inputs: Inputs) -> Tensor:
    """Log-probs of the sampled tokens."""
    return dense_log(inputs.hidden_NH, inputs.student).gather(-1, inputs.target_N[:, None])[:, 0]


def dense_reverse_kl(inputs: Inputs) -> Tensor:
    """KL(student || teacher) of each token."""
    student_NV = dense_log(inputs.hidden_NH, inputs.student)
    difference_NV = student_NV - dense_log(inputs.teacher_NH, inputs.teacher)
    return (student_NV.exp() * difference_NV).sum(-1)


def dense_on_support(inputs: Inputs) -> Tensor:
    """The same on the teacher's top-k and one bucket for the tail."""
    student_NV = dense_log(inputs.hidden_NH, inputs.student)
    top_NK = student_NV.gather(-1, inputs.support_NK)
    outside_NV = student_NV.scatter(-1, inputs.support_NK, -torch.inf)
    student_NS = torch.cat([top_NK, outside_NV.logsumexp(-1, keepdim=True)], -1)
    return (student_NS.exp() * (student_NS - with_tail(inputs.support_log_NK))).sum(-1)


def ours(inputs: Inputs, *divergences: Divergence) -> dict[str, Tensor]:
    """What `HybridTrainer` runs."""
    full = any(d.support == "full" for d in divergences)
    top = any(d.support == "teacher" for d in divergences)
    request = Request(
        target_BT=inputs.target_N[None],
        mask_BT=torch.ones(1, len(inputs.target_N), dtype=torch.bool),
        divergences=divergences,
        teacher_hidden_BTH=inputs.teacher_NH[None] if full else None,
        teacher_head=inputs.teacher if full else None,
        support_ids_BTK=inputs.support_NK[None] if top else None,
        support_logprob_BTK=inputs.support_log_NK[None] if top else None,
    )
    return measure(inputs.hidden_NH[None], Head(inputs.student), request)


def fused(inputs: Inputs) -> Tensor:
    """TRL's own head: log-probs and entropies of sampled tokens."""
    found = ChunkedLogProbFunction.apply(
        inputs.hidden_NH,
        inputs.student.weight,
        None,
        inputs.target_N,
        1.0,
        TRL_CHUNK,
        None,
        1.0,
        ("log_probs", "entropy"),
    )
    return found[0]


Way = Callable[[Inputs], Tensor]

REVERSE_KL = Divergence("reverse_kl")
ON_SUPPORT = Divergence("reverse_kl", support="teacher", top_k=SUPPORT)
CASES: dict[str, tuple[Way, Way]] = {
    "reverse KL": (lambda inputs: ours(inputs, REVERSE_KL)["divergence/0"][0], dense_reverse_kl),
    "reverse KL, top 64": (lambda inputs: ours(inputs, ON_SUPPORT)["divergence/0"][0], dense_on_support),
    "sampled tokens": (lambda inputs: ours(inputs)["logprobs"][0], dense_sampled),
    "sampled tokens, TRL's head": (fused, dense_sampled),
}
"""Ours and the dense arithmetic of each term."""


def step(way: Way, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Forward and backward; the values and the gradient of the hidden states."""
    inputs.student.weight.grad = inputs.hidden_NH.grad = None
    value_N = way(inputs)
    value_N.mean().backward()
    assert inputs.hidden_NH.grad is not None
    return value_N.detach(), inputs.hidden_NH.grad


def counted_bytes(call: Callable[[], object]) -> int:
    """The most that PyTorch's allocator held at once beyond what it held before, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Cost:
    """What one process measured."""

    case: str
    is_dense: bool
    extra_mb: float
    wall_s: float


def measured(case: str, is_dense: bool, sizes: Sizes, values: Path) -> Cost:
    """Runs one way in this process, which has run nothing else."""
    inputs = Inputs.make(sizes)
    way = CASES[case][is_dense]
    step(way, inputs.first(8))
    inputs.student.weight.grad = None
    before, began = resident_mb(), time.perf_counter()
    value_N, grad_NH = step(way, inputs)
    wall_s = time.perf_counter() - began
    extra_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    torch.save({"value": value_N, "grad": grad_NH}, values)
    return Cost(case, is_dense, extra_mb, wall_s)


def resident_mb() -> float:
    """What this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def available_gb() -> float:
    """What the machine has to give."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 1e6


def in_process(case: str, is_dense: bool, sizes: Sizes, folder: Path) -> tuple[Cost, dict[str, Tensor]]:
    """The same in a process of its own; also the values that it found."""
    values = folder / "values.pt"
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--one",
        case,
        str(values),
        *(["--dense"] if is_dense else []),
    ]
    for name, value in asdict(sizes).items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(**json.loads(done.stdout)), torch.load(values)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference."""
    return float((one - other).abs().max())


def compare(cases: Sequence[str], sizes: Sizes, console: Console) -> Table:
    """Both ways of each case, one process after the other."""
    what = f"{sizes.rows} x {sizes.tokens:,} tokens, hidden {sizes.hidden:,}, vocabulary {sizes.vocab:,}, float32"
    table = Table(title=f"Extra peak memory of a step: {what}")
    columns = ("term", "dense, MB", "ours, MB", "ratio", "dense, s", "ours, s", "values differ by", "gradients by")
    for name in columns:
        table.add_column(name, justify="left" if name == "term" else "right")
    dense_of: dict[Way, tuple[Cost, dict[str, Tensor]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            console.print(f"{case} ...", style="dim")
            own, found = in_process(case, False, sizes, Path(folder))
            way = CASES[case][1]
            if way not in dense_of:
                dense_of[way] = in_process(case, True, sizes, Path(folder))
            dense, wanted = dense_of[way]
            scale = float(wanted["grad"].abs().max())
            table.add_row(
                case,
                f"{dense.extra_mb:,.0f}",
                f"{own.extra_mb:,.0f}",
                f"1/{dense.extra_mb / own.extra_mb:.1f}",
                f"{dense.wall_s:.0f}",
                f"{own.wall_s:.0f}",
                f"{largest_difference(found['value'], wanted['value']):.1e} nats",
                f"{largest_difference(found['grad'], wanted['grad']) / scale:.1e} of the largest",
            )
    return table


def main() -> None:
    """Compares all cases, or measures one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--dense", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(**{name: getattr(arguments, name) for name in asdict(Sizes())})
    if arguments.one:
        print(json.dumps(asdict(measured(arguments.one[0], arguments.dense, sizes, Path(arguments.one[1])))))
        return
    needed = (DENSE_COPIES * sizes.dense_bytes + 12 * sizes.hidden * sizes.vocab) / 1e9
    if needed > available_gb():
        raise SystemExit(
            f"the dense arithmetic may take {needed:.0f} GB, and {available_gb():.0f} are free; ask for fewer --tokens"
        )
    console = Console(width=140)
    console.print(compare(arguments.cases, sizes, console))


if __name__ == "__main__":
    main()

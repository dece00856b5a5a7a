"""Settings that are fine one by one and have no meaning together; told when the YAML is read."""

import difflib
from collections.abc import Iterator

from hybrid.config import ExperimentConfig
from hybrid.errors import ConfigError
from hybrid.methods import MethodConfig
from hybrid.objective.losses import Divergence
from hybrid.objective.objective import Objective
from hybrid.per_method import label_problem
from hybrid.teacher_config import (
    LocalTeacherConfig,
    RecordedTeacherConfig,
    RoutedTeacherConfig,
    SelfTeacherConfig,
    ServedTeacherConfig,
    teachers_of,
)
from hybrid.trl_fields import IDLE_NAMES, OWN_NAMES, SURROGATE_DEFAULTS, trl_field_names
from hybrid.yaml_file import KeyPath

Contradiction = tuple[KeyPath, str]
"""Where the trouble stands in the YAML, and what it is."""

OWN_VIEWS = frozenset({"student", "reference"})
"""Views that the student gives itself, now and as it was at the start."""


def contradictions(config: ExperimentConfig) -> list[Contradiction]:
    """Everything about an experiment that cannot work, though each setting by itself could.

    Returns:
      One entry per trouble; empty for an experiment that may run.
    """
    found = [*_batches(config), *_trl(config), *_rewards(config), *_evaluation(config), *_labels(config)]
    if uses_teacher(config):
        found += _temperatures(config)
    paths: list[KeyPath] = [("method",), *(("compare", index) for index in range(len(config.compare)))]
    for path, method in zip(paths, (config.method, *config.compare), strict=True):
        found += _method(config, (*path, "name"), method)
    return found


def uses_teacher(config: ExperimentConfig) -> bool:
    """Whether some method of the experiment reads a teacher's scores."""
    for method in config.methods.values():
        try:
            needs = method.build().needs
        except ValueError:
            continue  # told with the method
        if teacher_measurements(method, needs):
            return True
    return False


def teacher_measurements(method: MethodConfig, needs: frozenset[str]) -> list[str]:
    """Those of a method's measurements that the run's teacher gives, and not the student itself."""
    views = {need.split(".")[1] for need in needs if need.startswith("scores.")} - OWN_VIEWS
    own = {name for name, view in method.views.items() if view.scorer == "self"}
    return sorted({f"scores.{name}" for name in views - own} | ({"kl"} & needs))


def _batches(config: ExperimentConfig) -> Iterator[Contradiction]:
    train, processes = config.train, config.engine.processes or 1
    responses = train.prompts_per_step * train.generations
    if responses % processes:
        yield (
            ("train", "prompts_per_step"),
            f"a step has {train.prompts_per_step} * {train.generations} = {responses} responses, which {processes} "
            "processes cannot share evenly; change prompts_per_step, generations or engine.processes",
        )
    elif train.micro_batch is not None and (responses // processes) % train.micro_batch:
        yield (
            ("train", "micro_batch"),
            f"a step has {train.prompts_per_step} * {train.generations} / {processes} = {responses // processes} "
            f"responses per process, which micro-batches of {train.micro_batch} do not divide; choose a divisor",
        )


def _temperatures(config: ExperimentConfig) -> Iterator[Contradiction]:
    if config.teacher is None:
        return
    for name, teacher in teachers_of(config.teacher).items():
        if not isinstance(teacher, ServedTeacherConfig):
            continue
        path = ("teacher", "teachers", name) if isinstance(config.teacher, RoutedTeacherConfig) else ("teacher",)
        if teacher.temperature not in (None, 1.0):
            yield (
                (*path, "temperature"),
                f"is {teacher.temperature}, and a vLLM server scores prompts at temperature 1 whatever it is asked; "
                "leave it at 1, or use a local teacher",
            )
        elif config.train.temperature != 1.0:
            yield (
                ("train", "temperature"),
                f"is {config.train.temperature}, and a vLLM server scores at temperature 1 whatever it is asked, so "
                "student and teacher would be compared at different temperatures; use 1, or a local teacher",
            )


def _trl(config: ExperimentConfig) -> Iterator[Contradiction]:
    names = trl_field_names() if config.train.trl else frozenset()
    for key in config.train.trl:
        if key in OWN_NAMES:
            yield ("train", "trl", key), f"is set by {OWN_NAMES[key]} here; set it there"
        elif key == "hub_token":
            yield ("train", "trl", key), "is a secret, which no YAML should hold; put it into the environment: HF_TOKEN"
        elif key in IDLE_NAMES:
            yield ("train", "trl", key), f"would change nothing: {IDLE_NAMES[key]}; leave it out"
        elif key not in names:
            near = difflib.get_close_matches(key, sorted(names), n=1)
            hint = f"did you mean {near[0]}?" if near else "see the documentation of GRPOConfig"
            yield ("train", "trl", key), f"is no field of TRL's GRPOConfig; {hint}"
    if config.train.trl.get("loss_type") == "cispo":
        high = config.train.trl.get("epsilon_high") or config.train.trl.get("epsilon", 0.2)
        if isinstance(high, int | float) and high < 1:
            yield (
                ("train", "trl", "loss_type"),
                f"cispo clips every ratio at epsilon_high, which is {high}, so all gradients shrink to that share; set "
                "epsilon_high to 1 or more (5.0 in its paper)",
            )


def _rewards(config: ExperimentConfig) -> Iterator[Contradiction]:
    if config.rewards and all(reward.weight == 0 for reward in config.rewards):
        yield ("rewards",), "all have the weight 0, so every response would be worth 0; give one a weight"


def _evaluation(config: ExperimentConfig) -> Iterator[Contradiction]:
    if config.evaluate is not None and not config.rewards:
        yield ("evaluate",), "needs rewards to judge the answers; add rewards, or write evaluate: null"


def _labels(config: ExperimentConfig) -> Iterator[Contradiction]:
    for label in config.student.per_method:
        if (wrong := label_problem(label, config.methods)) is not None:
            yield ("student", "per_method", label), wrong


def _method(config: ExperimentConfig, path: KeyPath, method: MethodConfig) -> Iterator[Contradiction]:
    try:
        objective = method.build()
    except ValueError as error:
        yield path, f"{method.name}: {error}"
        return
    least = getattr(method, "smallest_group", method.min_generations)
    if config.train.generations < least:
        yield (
            ("train", "generations"),
            f"is {config.train.generations}, and {method.name} compares at least {least} responses per prompt",
        )
    yield from _idle(config, method.name, objective)
    yield from _one_measurement(path, method.name, objective)
    yield from _measurements(config, path, method, objective)


def _idle(config: ExperimentConfig, name: str, objective: Objective) -> Iterator[Contradiction]:
    """Fields of TRL's surrogate, with a method that it does not compute."""
    wanted = [key for key, default in SURROGATE_DEFAULTS.items() if config.train.trl.get(key, default) != default]
    if not wanted:
        return
    from hybrid.generation import surrogate_term, without_surrogate

    if surrogate_term(objective) is None:
        yield ("train", "trl", wanted[0]), without_surrogate(name)


def _one_measurement(path: KeyPath, name: str, objective: Objective) -> Iterator[Contradiction]:
    """Distributions of two scorers, or on two supports, which a run does not measure at once."""
    from hybrid.collect import Plan

    plan = Plan.of(objective)
    try:
        _ = (plan.distribution_view, plan.support)
    except ConfigError as error:
        yield path, f"{name}: {error}"
        return
    wanted = sorted({_of_reverse_kl(d) for d in objective.divergences if d.kind == "reverse_kl"})
    if "kl" in plan.needs and len(wanted) > 1:
        yield (
            path,
            f"{name}: a gate reads the reverse KL, which is measured once, and the terms want it on "
            f"{' and on '.join(wanted)}; give them one top_k, support and temperature (top_k: 0 is the vocabulary)",
        )


def _of_reverse_kl(divergence: Divergence) -> str:
    """On what a reverse KL is measured, in words."""
    full = divergence.support == "full"
    tokens = "the vocabulary" if full else f"the top {divergence.top_k} ({divergence.support})"
    return tokens if divergence.temperature == 1 else f"{tokens} at temperature {divergence.temperature:g}"


def _measurements(
    config: ExperimentConfig, path: KeyPath, method: MethodConfig, objective: Objective
) -> Iterator[Contradiction]:
    needs, name = objective.needs, method.name
    if "reward" in needs and not config.rewards:
        yield (
            path,
            f"{name} needs a reward, and the experiment has no rewards; add rewards: [{{name: math}}] or another",
        )
    views = teacher_measurements(method, needs)
    if views and config.teacher is None:
        yield (
            path,
            f"{name} needs a teacher ({', '.join(views)}), and the experiment has none; add teacher: {{model: ...}}, "
            "or choose a method without one, such as grpo",
        )
    for column in sorted({"demonstration", "teacher_accuracy"} & needs):
        if config.data.columns is not None and column not in config.data.columns:
            yield (
                path,
                f"{name} needs the data column {column}, and data.columns leaves it out; make it with "
                "`hybrid teacher demonstrate` and list it there",
            )
    if config.teacher is not None:
        if views:
            yield from _transport(config, path, method, objective)
            yield from _alignment(config, path, name, objective)
        yield from _own_opinion(config, path, name, views)


def _transport(
    config: ExperimentConfig, path: KeyPath, method: MethodConfig, objective: Objective
) -> Iterator[Contradiction]:
    """What a server, a recording or a cache cannot deliver."""
    assert config.teacher is not None
    name = method.name
    own = {view for view, spec in method.views.items() if spec.scorer == "self"}
    divergences = [divergence for divergence in objective.divergences if divergence.view not in own]
    for teacher in teachers_of(config.teacher).values():
        is_cached = isinstance(teacher, LocalTeacherConfig) and teacher.cache is not None
        if not (is_cached or isinstance(teacher, ServedTeacherConfig | RecordedTeacherConfig)):
            continue
        is_served = isinstance(teacher, ServedTeacherConfig)
        who = "a vLLM server" if is_served else "a cache" if is_cached else "a recording"
        can_choose = is_cached or (is_served and teacher.candidates)
        choices = (
            "its choices are: log-probs of the sampled tokens (opd with estimator k1, k2 or k3; opdvr; sipo), the "
            "teacher's own top_k (support: teacher for forward_kl; teacher or intersection for candidates), or a local "
            "teacher"
        )
        for divergence in divergences:
            if divergence.support == "full":
                yield path, f"{name} needs full distributions for {divergence.kind}, which {who} cannot give; {choices}"
            elif divergence.support == "union":
                yield (
                    path,
                    f"{name} needs {divergence.kind} on the top {divergence.top_k} of both sides, which {who} cannot "
                    f"give; {choices}",
                )
            elif divergence.support == "student" and not can_choose:
                yield (
                    path,
                    f"{name} needs {divergence.kind} on the student's top {divergence.top_k}, which {who} cannot give "
                    f"unless it scores chosen ids (teacher.candidates: true, on a GPU); {choices}",
                )
            elif divergence.support == "teacher" and divergence.kind != "forward_kl":
                yield (
                    path,
                    f"{name} needs {divergence.kind}, whose support is the student's, and {who} answers with the "
                    f"teacher's top {divergence.top_k}; {choices}",
                )
        supports = {candidates.support for candidates in objective.candidates}
        if "student" in supports and not can_choose:
            yield (
                path,
                f"{name} needs the teacher's scores of the student's own top_k, which {who} cannot give unless it "
                f"scores chosen ids (teacher.candidates: true, on a GPU); {choices}",
            )
        if "union" in supports:
            yield (
                path,
                f"{name} needs the teacher's own top_k and its scores of the student's, which {who} cannot give at "
                f"once; {choices}",
            )
        return


def _alignment(config: ExperimentConfig, path: KeyPath, name: str, objective: Objective) -> Iterator[Contradiction]:
    """A teacher with another tokenizer has no opinion on the student's vocabulary."""
    assert config.teacher is not None
    aligned = [t for t in teachers_of(config.teacher).values() if getattr(t, "align", False)]
    needs = sorted(need for need in objective.needs if need == "kl" or need.endswith(".top"))
    if aligned and (objective.divergences or needs):
        what = objective.divergences[0].kind if objective.divergences else needs[0]
        yield (
            path,
            f"{name} needs {what}, which compares distributions over one vocabulary, and the teacher has another "
            "tokenizer (teacher.align); choose a method of sampled tokens, or a teacher with the student's tokenizer",
        )


def _own_opinion(config: ExperimentConfig, path: KeyPath, name: str, views: list[str]) -> Iterator[Contradiction]:
    """A teacher that is the student of this moment under the student's own prompt."""
    teacher = config.teacher
    if not isinstance(teacher, SelfTeacherConfig):
        return
    sees_the_same = teacher.context is None and teacher.prompt is None
    if teacher.own.sync == "live" and sees_the_same and {"scores.teacher", "kl"} & set(views):
        yield (
            ("teacher",),
            f"is the live student under the student's own prompt, so the teacher's signal of {name} is identically "
            "zero; give it a context, or sync: snapshot",
        )
    if teacher.own.sync == "base" and config.student.lora is None:
        yield ("teacher",), "is the model under the LoRA adapter, and the student has none; add student.lora"

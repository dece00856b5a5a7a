"""The command line: `hybrid train FILE` and what stands beside it; each command imports what it needs itself."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

File = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment's YAML file.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Overrides a setting of the file, e.g. --set train.steps=20 or --set method.name=opd (which drops the old "
        "method's settings). May be given again and again.",
        show_default=False,
    ),
]

app = typer.Typer(
    name="hybrid",
    help="Trains language models by reinforcement learning and on-policy distillation in one objective.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def train(
    file: File,
    settings: Settings = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[latest|FOLDER]",
            help="Goes on with the latest start of this experiment, or with the start in that folder.",
            show_default=False,
        ),
    ] = None,
    from_best: Annotated[
        bool,
        typer.Option(
            "--from-best",
            help="Goes back to the checkpoint with the best held-out accuracy, in place of the newest; the later ones "
            "are removed, and a new MLflow run begins with the points up to it.",
        ),
    ] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines that train together; run this command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of the machines this is, from 0.")] = 0,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the machines meet: an address of machine 0.", show_default=False),
    ] = None,
) -> None:
    """Trains the student of an experiment, by its method and by those it is compared with."""
    from hybrid.engine import Nodes
    from hybrid.launch import train_experiment
    from hybrid.read_config import read_experiment

    nodes = Nodes(nnodes, node_rank, rendezvous)
    overrides = settings or []
    config = read_experiment(file, overrides)
    raise typer.Exit(
        train_experiment(config, source=file, resume=resume, from_best=from_best, overrides=overrides, nodes=nodes)
    )


@app.command()
def check(
    file: File,
    settings: Settings = None,
    live: Annotated[bool, typer.Option("--live", help="Also asks the teachers to score one sequence.")] = False,
) -> None:
    """Finds out what is wrong with an experiment before anything is trained. Exit code 2 where something is."""
    from hybrid.check import check_experiment

    findings = check_experiment(file, settings or [], live=live)
    console, errors = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)
    for finding in findings:
        if finding.level == "error":
            errors.print(str(finding), style="red", markup=False, highlight=False)
        elif finding.level == "warning":
            console.print(f"warning: {finding}", style="yellow", markup=False, highlight=False)
        else:
            console.print(str(finding), style="dim", markup=False, highlight=False)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)
    console.print(f"{file}: fine", style="green", markup=False, highlight=False)


@app.command("eval")
def evaluate(
    file: File,
    settings: Settings = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A checkpoint or model to judge; without it, the student as it is before the training.",
            show_default=False,
        ),
    ] = None,
    served: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A vLLM server whose model is judged; its key, if it has one, stands in HYBRID_TEACHER_API_KEY.",
            show_default=False,
        ),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="The model as that server calls it.", show_default="its first")
    ] = None,
) -> None:
    """Measures the held-out accuracy of a student, a checkpoint or a served model: avg@k and pass@k, with intervals."""
    from hybrid.eval_command import evaluate_experiment
    from hybrid.read_config import read_experiment

    config = read_experiment(file, settings or [])
    found = evaluate_experiment(config, source=file, checkpoint=checkpoint, served=served, served_model=served_model)
    raise typer.Exit(found)


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method, for its formula and settings.", show_default=False)
    ] = None,
) -> None:
    """Lists the methods, or tells all about one."""
    from hybrid.describe import describe, overview

    Console().print(overview() if name is None else describe(name))


@app.command()
def explain(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rollouts as JSON Lines.", show_default=False)],
    method: Annotated[str | None, typer.Option(help="The method that is asked.", show_default=False)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method.", show_default=False),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Updates made before this batch, for schedules.")] = 0,
    state: Annotated[
        Path | None, typer.Option(help="JSON with the state of a stateful method before it.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object in place of a table.")] = False,
    compare: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Shows which tokens these methods treat differently.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Writes a page with every token coloured by its credit.", show_default=False)
    ] = None,
) -> None:
    """Shows what a method would do with recorded rollouts, token by token and without a model."""
    from hybrid.explain_command import run_explain

    shown = run_explain(file, method, settings or [], step, state, as_json, compare, html)
    if isinstance(shown, str):
        sys.stdout.write(shown + "\n")
    else:
        Console().print(shown)


@app.command()
def ui(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The experiment whose runs are shown.", show_default=False)
    ] = None,
    settings: Settings = None,
    uri: Annotated[str | None, typer.Option(help="Tracking URI, in place of the file's.", show_default=False)] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of runs, in place of the file's.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of this machine alone.")] = 5000,
) -> None:
    """Opens MLflow on the runs, in a browser on this machine; ctrl-C ends it."""
    from hybrid.ui import open_ui

    raise typer.Exit(open_ui(file, settings or [], uri=uri, folder=folder, port=port))


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The sweep's YAML file.", show_default=False)],
    settings: Settings = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at once.", show_default="one per GPU, or per core")
    ] = None,
) -> None:
    """Runs a grid of methods, settings and seeds from one file; a second start goes on with what is missing."""
    from hybrid.sweep import run_sweep

    raise typer.Exit(run_sweep(file, settings or [], jobs=jobs))


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(help="Name of the MLflow experiment.", show_default=False)],
    baseline: Annotated[str | None, typer.Option(help="Method to compare with.", show_default="grpo")] = None,
    metric: Annotated[str | None, typer.Option(help="Evaluation to compare.", show_default="avg@k")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy whose cost is asked for.", show_default=False)] = None,
    wanted: Annotated[float, typer.Option(help="Difference that you would like to be able to see.")] = 0.03,
    uri: Annotated[str | None, typer.Option(help="Tracking URI.", show_default="the store in --folder")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Where report and picture go.", show_default=False)] = None,
) -> None:
    """Compares the methods of an experiment with intervals, paired exact tests and a plain sentence each."""
    from hybrid.comparison import compare_runs
    from hybrid.mlflow_store import default_uri

    compare_runs(
        uri=uri or default_uri(folder),
        experiment=experiment,
        baseline=baseline,
        metric=metric,
        target=target,
        wanted=wanted,
        folder=out or folder / experiment / "comparison",
        title=experiment,
        console=Console(),
    )


teacher_app = typer.Typer(help="Serves an experiment's teacher, or lets it answer beforehand.", no_args_is_help=True)
app.add_typer(teacher_app, name="teacher")


@teacher_app.command("serve")
def serve_teacher(file: File, settings: Settings = None) -> None:
    """Prints and runs the server of an experiment's teacher, until ctrl-C."""
    from hybrid.read_config import read_experiment
    from hybrid.serve_command import serve_experiment

    raise typer.Exit(serve_experiment(read_experiment(file, settings or [])))


@teacher_app.command("demonstrate")
def demonstrate_teacher(
    file: File,
    out: Annotated[Path, typer.Argument(help="JSON Lines file to write.", show_default=False)],
    settings: Settings = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 8,
) -> None:
    """Writes the prompts with the teacher's accuracy and its shortest right answer, which RSTG and SFT read."""
    from hybrid.demonstrate import demonstrate
    from hybrid.progress import Bars
    from hybrid.read_config import read_experiment

    console = Console()
    with Bars(console) as bars:
        found = demonstrate(read_experiment(file, settings or []), out, samples=samples, report=bars.advance)
    accuracy, share = 100 * found["teacher_accuracy"], 100 * found["with_demonstration"]
    console.print(f"{out}: teacher right in {accuracy:.1f} %, {share:.1f} % of prompts with a demonstration")


def main() -> NoReturn:
    """Runs the command line; a user's error is one message and exit code 2, with no traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app(args=with_newest(sys.argv[1:]))
    except ValueError as error:
        message = user_message(error)
        if message is None:
            raise
        _refuse(message)
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is closed; an exit is no more to be interrupted
    sys.exit(0)


def _refuse(message: str) -> NoReturn:
    """Ends the program with one message and exit code 2."""
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False, highlight=False)
    sys.exit(2)


def with_newest(arguments: list[str]) -> list[str]:
    """The arguments with a bare `--resume` as `--resume latest`."""
    completed: list[str] = []
    for place, argument in enumerate(arguments):
        completed.append(argument)
        is_bare = place + 1 == len(arguments) or arguments[place + 1].startswith("-")
        if argument == "--resume" and is_bare:
            completed.append("latest")
    return completed


def user_message(error: ValueError) -> str | None:
    """What a user is told of an error of theirs; None for an error of this program."""
    from pydantic import ValidationError

    from hybrid.errors import HybridError
    from teachers.errors import TeacherError

    if isinstance(error, HybridError | TeacherError):
        return str(error)
    if isinstance(error, ValidationError):
        return "\n".join(
            ": ".join([".".join(map(str, details["loc"])), details["msg"]])
            for details in error.errors(include_url=False)
        )
    return None


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    """Ends the program as SIGTERM would, with everything closed on the way."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()

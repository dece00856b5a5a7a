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
) -> None:
    """Trains the student of an experiment, by its method and by those it is compared with."""
    from hybrid.launch import train_experiment
    from hybrid.read_config import read_experiment

    config = read_experiment(file, settings or [])
    raise typer.Exit(train_experiment(config, source=file, resume=resume))


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
) -> None:
    """Measures the held-out accuracy of a student or of a checkpoint: avg@k and pass@k, with intervals."""
    from hybrid.launch import evaluate_experiment
    from hybrid.read_config import read_experiment

    config = read_experiment(file, settings or [])
    raise typer.Exit(evaluate_experiment(config, source=file, checkpoint=checkpoint))


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
        Path | None, typer.Argument(metavar="[FILE]", help="The experiment whose runs are shown.", show_default=False)
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
        Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False, highlight=False)
        sys.exit(2)
    sys.exit(0)


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

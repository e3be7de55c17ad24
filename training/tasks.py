"""Templates of task.yaml: `python -m training.tasks` lists, shows and writes them."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from model_store.errors import TaskError
from model_store.task import Task

app = typer.Typer(add_completion=False, no_args_is_help=False, help="Templates of task.yaml.")


def _folder() -> Traversable:
    return files("training").joinpath("task_templates")


def names() -> tuple[str, ...]:
    """Return the templates' names, sorted."""
    found = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def text(name: str) -> str:
    """Return the text of a template, including comments. Raises TaskError for an unknown name."""
    if name not in names():
        raise TaskError(f"no template '{name}'; expected one of {', '.join(names())}")
    return _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def template(name: str) -> Task:
    """Load a template as a task. Raises TaskError for an unknown name."""
    return Task.model_validate(yaml.safe_load(text(name)))


def resolve(reference: str, *, for_plan: bool = False) -> Task:
    """Load the task from the file of that name, otherwise from the template. Raises TaskError.

    `for_plan`: it need not say a size or a geometry.
    """
    path = Path(reference)
    if path.is_file():
        return Task.load(path, for_plan=for_plan)
    if path.suffix in {".yaml", ".yml"}:
        raise TaskError(f"{path}: no such file; the templates are {', '.join(names())}")
    return template(reference)


@app.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    table = Table(box=None, header_style="bold")
    for heading in ("template", "labels or classes", "channels", "size"):
        table.add_column(heading)
    for name in names():
        task = template(name)
        labels = ", ".join(
            task.class_names or (f"{label} {{{', '.join(map(str, v))}}}" for label, v in task.labels.items())
        )
        channels = str(task.channel_count) + (f", ±{task.neighbours} slices" if task.neighbours else "")
        table.add_row(name, labels, channels, "x".join(map(str, task.size)))
    Console().print(table)


@app.command()
def show(name: str) -> None:
    """Print a template."""
    console = Console()
    content = _text_or_exit(name)
    if console.is_terminal:
        console.print(Syntax(content, "yaml", background_color="default"))
    else:
        typer.echo(content, nl=False)


@app.command()
def write(name: str, folder: Path, force: Annotated[bool, typer.Option(help="Overwrite.")] = False) -> None:
    """Write a template to FOLDER/task.yaml, where it can be edited."""
    # It imports torch, which help does not need.
    from training.data.federation import TASK_FILE

    target = folder / TASK_FILE
    content = _text_or_exit(name)
    if target.exists() and not force:
        typer.echo(f"{target} exists already; --force overwrites it", err=True)
        raise typer.Exit(1)
    if not folder.is_dir():
        typer.echo(f"{folder} is not a folder", err=True)
        raise typer.Exit(1)
    target.write_text(content, encoding="utf-8")
    typer.echo(f"wrote {target}")


def _text_or_exit(name: str) -> str:
    try:
        return text(name)
    except TaskError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()

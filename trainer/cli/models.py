# SPDX-License-Identifier: Apache-2.0
"""The commands that get a model out of a run and try it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from isthmus.trainer.cli.config import AsJson
from isthmus.trainer.cli.support import RUNS_FOLDER, choose_folder
from isthmus.trainer.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from isthmus.trainer.config.job import Device


class On(StrEnum):
    """Where a model is judged."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def export(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A peer's folder, or one checkpoint.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the model.")] = Path("model"),
    as_json: AsJson = False,
) -> int:
    """Write the model of a run's newest checkpoint. Prints its folder."""
    import msgspec

    from isthmus.trainer.checkpoint.export import export_model

    exported = export_model(_source(directory), out)
    if as_json:
        result = {
            "schema": "isthmus.export/1",
            "run_id": exported.run_id,
            "outer_step": exported.outer_step,
            "num_parameters": exported.num_parameters,
            "directory": str(exported.directory),
        }
        print(msgspec.json.encode(result).decode())
    else:
        print(exported.directory)
    return int(ExitCode.DONE)


def evaluate(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="A peer's folder, one checkpoint, or a folder written by isthmus export. Default: under runs/.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Another text, of which all is judged. Default: what the run holds out."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Judge about so many, spread over the text. Default: all.", min=1)
    ] = None,
    device: Annotated[On, typer.Option("--device", help="Where; auto: on a GPU, if there is one.")] = On.AUTO,
    as_json: AsJson = False,
) -> int:
    """Judge a model on held-out text: loss, bits a byte and perplexity."""
    import msgspec

    from isthmus.trainer.run.judging import judge_model, render_judged

    judged = judge_model(_source(source), data=data, num_tokens=tokens, device=cast("Device", str(device)))
    print(msgspec.json.encode(judged).decode() if as_json else render_judged(judged))
    return int(ExitCode.DONE)


def _source(given: Path | None) -> Path:
    """Where a model is: the folder given, or that of the peer with the newest checkpoint under `runs/`."""
    from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, furthest_of_one_run

    if given is None:  # a founder's and a joiner's on one machine are of one run
        given = furthest_of_one_run(sorted(path.parent for path in RUNS_FOLDER.glob(f"*/{FOLDER_NAME}")))
    return choose_folder(given, holding=FOLDER_NAME, or_else=ConfigError)


def sample(
    prompt: Annotated[str, typer.Argument(help="How the text begins.")],
    model: Annotated[Path, typer.Option("--model", help="Folder written by isthmus export.")] = Path("model"),
    tokens: Annotated[int, typer.Option(help="How many bytes to add.", min=0, max=1_000_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte each time.", min=0.0)] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among the k likeliest only.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> int:
    """Let a model continue a text."""
    from isthmus.trainer.model.generate import generate, load_model

    decoder = load_model(model)
    start = prompt.encode()
    try:
        text = generate(decoder, start, max_new_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    except ValueError as error:
        raise ConfigError(f"the model in {model} cannot continue this: {error}") from error
    print((start + text).decode(errors="replace"))
    return int(ExitCode.DONE)

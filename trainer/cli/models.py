# SPDX-License-Identifier: Apache-2.0
"""The commands that get a model out of a run and try it."""

from pathlib import Path
from typing import Annotated

import typer

from isthmus.trainer.cli.config import AsJson
from isthmus.trainer.cli.support import RUNS_FOLDER, choose_folder
from isthmus.trainer.errors import ConfigError, ExitCode


def export(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A peer's folder, or one checkpoint.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the model.")] = Path("model"),
    as_json: AsJson = False,
) -> int:
    """Write the model of a run's newest checkpoint. Prints its folder."""
    import msgspec

    from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, furthest_of_one_run
    from isthmus.trainer.checkpoint.export import export_model

    if directory is None:  # a founder's and a joiner's on one machine are of one run
        directory = furthest_of_one_run(sorted(path.parent for path in RUNS_FOLDER.glob(f"*/{FOLDER_NAME}")))
    exported = export_model(choose_folder(directory, holding=FOLDER_NAME, or_else=ConfigError), out)
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

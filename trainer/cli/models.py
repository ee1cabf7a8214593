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
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Where the Hugging Face model is that the run began with.", show_default=False),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write the LoRA adapters alone, for PEFT, and merge nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write the model of a run's newest checkpoint. Prints its folder."""
    import msgspec

    from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, furthest_of_one_run
    from isthmus.trainer.checkpoint.export import export_model

    if directory is None:  # a founder's and a joiner's on one machine are of one run
        directory = furthest_of_one_run(sorted(path.parent for path in RUNS_FOLDER.glob(f"*/{FOLDER_NAME}")))
    exported = export_model(
        choose_folder(directory, holding=FOLDER_NAME, or_else=ConfigError), out, base=base, adapters_only=adapters
    )
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
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=0, max=1_000_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among the k likeliest only.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> int:
    """Let a model continue a text."""
    from isthmus.trainer.data.tokenizer import Bytes, FileTokenizer, Tokenizer
    from isthmus.trainer.model.exported import has_bytes, load_model
    from isthmus.trainer.model.generate import generate
    from isthmus.trainer.model.model_folder import TOKENIZER_NAME

    network = load_model(model)
    words: Tokenizer = Bytes() if has_bytes(model) else FileTokenizer(model / TOKENIZER_NAME, needs_end=False)
    begin = prompt or "\n"
    start = list(begin.encode()) if isinstance(words, Bytes) else next(words.encode([begin])).tolist()
    try:
        new = generate(
            network,
            start,
            max_new_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            end=words.end_of_document,
            vocab_size=words.vocab_size,
        )
    except ValueError as error:
        raise ConfigError(f"the model in {model} cannot continue this: {error}") from error
    print(words.decode([*start, *new]) if prompt else words.decode(new))
    return int(ExitCode.DONE)

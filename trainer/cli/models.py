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


BaseModel = Annotated[
    Path | None,
    typer.Option("--base", help="Where the Hugging Face model is that the run began with.", show_default=False),
]


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
    base: BaseModel = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write the LoRA adapters alone, for PEFT, and merge nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Write the model of a run's newest checkpoint. Prints its folder."""
    import msgspec

    from isthmus.trainer.checkpoint.export import export_model

    exported = export_model(_source(directory), out, base=base, adapters_only=adapters)
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
    base: BaseModel = None,
    as_json: AsJson = False,
) -> int:
    """Judge a model on held-out text: loss, bits a byte and perplexity."""
    import msgspec

    from isthmus.trainer.run.judging import judge_model, render_judged

    judged = judge_model(_source(source), data=data, num_tokens=tokens, device=cast("Device", str(device)), base=base)
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
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=0, max=1_000_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among the k likeliest only.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0, max=2**63 - 1, metavar="<int>")] = 0,
) -> int:
    """Let a model continue a text."""
    from isthmus.trainer.data.tokenizer import Bytes, FileTokenizer, Tokenizer
    from isthmus.trainer.model.exported import has_bytes, load_model
    from isthmus.trainer.model.generate import generate
    from isthmus.trainer.model.model_folder import TOKENIZER_NAME

    network = load_model(model)
    words: Tokenizer = Bytes() if has_bytes(model) else FileTokenizer(model / TOKENIZER_NAME, needs_end=False)
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # shells hand on any bytes
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

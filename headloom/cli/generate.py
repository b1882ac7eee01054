"""`headloom generate`: generate text with a checkpoint, grafted or not."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from headloom.cli.common import Json, ends_with_status, only_json_on_stdout, print_json
from headloom.cli.graft import Dtype, Model


@ends_with_status
def generate_command(
    model: Model,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 64,
    temperature: Annotated[
        float | None, typer.Option(help="Sample with this temperature. Default: always the most probable token.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the most probable tokens that sum to this.")] = None,
    beams: Annotated[int, typer.Option(help="Beams of a beam search; above 1 the text is printed at the end.")] = 1,
    cache: Annotated[str, typer.Option(help="dynamic, or static (allocated in advance).")] = "dynamic",
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Continue a prompt. The new text is printed while it is generated."""
    from headloom.core.errors import HeadloomError
    from headloom.hf import generation, places

    generation.check_settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, beams=beams, cache=cache
    )
    places.check_checkpoint(model, dtype=dtype)
    if not places.may_have_tokenizer(model):
        raise HeadloomError(generation.NO_TOKENIZER)
    from headloom.hf import checkpoints

    with only_json_on_stdout(as_json) as stdout:
        checkpoint = checkpoints.load_checkpoint(model, dtype=dtype, causal=True)
        found = generation.generate(
            checkpoint,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            beams=beams,
            cache=cache,
            seed=seed,
            write=(lambda text: None) if as_json else (lambda text: print(text, end="", flush=True)),
        )
        if as_json:
            print_json({"prompt": prompt, **dataclasses.asdict(found)}, stdout)
        else:
            print()

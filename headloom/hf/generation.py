"""Text from a model, piece by piece."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError, near

if TYPE_CHECKING:
    from headloom.hf.checkpoints import LoadedModel

CACHES = ("dynamic", "static")
NO_TOKENIZER = "this checkpoint has no tokenizer beside it: save one into its folder"


@dataclasses.dataclass(frozen=True)
class Generated:
    """What was written after the prompt, in tokens and seconds."""

    text: str
    tokens: int
    seconds: float


def generate(
    checkpoint: LoadedModel,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float | None = None,
    top_p: float | None = None,
    beams: int = 1,
    cache: str = "dynamic",
    seed: int = 0,
    write: Callable[[str], Any] = lambda text: None,
) -> Generated:
    """Continue `prompt`.

    Args:
        temperature, top_p: with one of them given tokens are sampled; without both the likeliest token is taken.
        beams: above 1: beam search. Its text is written at the end, since until then another beam may become the best.
        cache: "dynamic" grows with the text, "static" is allocated at once.
        write: called with every new piece of text as it comes.
    Raises:
        HeadloomError: no tokenizer, a prompt without tokens, or values out of range.
    """
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise HeadloomError(NO_TOKENIZER)
    check_settings(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, beams=beams, cache=cache)
    import torch

    given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if given["input_ids"].numel() == 0:
        raise HeadloomError("the prompt holds no tokens: give some text")
    sampling = {"temperature": 1.0 if temperature is None else temperature, "top_p": 1.0 if top_p is None else top_p}
    sampled = temperature is not None or top_p is not None
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    start = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        out = checkpoint.model.generate(
            **given.to(checkpoint.model.device),
            max_new_tokens=max_new_tokens,
            num_beams=beams,
            do_sample=sampled,
            **({**sampling, "top_k": 0} if sampled else {}),
            cache_implementation=cache,
            pad_token_id=pad,
            streamer=_streamer(tokenizer, write) if beams == 1 else None,
        )
    new = out[0, given["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    if beams > 1:
        write(text)
    return Generated(text, len(new), time.perf_counter() - start)


def check_settings(
    *, max_new_tokens: int, temperature: float | None, top_p: float | None, beams: int, cache: str
) -> None:
    """Raise HeadloomError for values of `generate` that are out of range."""
    for name, value, right in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1),
        ("beams", beams, beams >= 1),
        ("temperature", temperature, temperature is None or temperature > 0),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1),
    ):
        if not right:
            bound = "above 0 and at most 1" if name == "top_p" else "above 0"
            raise HeadloomError(f"{name} must be {bound}, not {value}")
    if cache not in CACHES:
        raise HeadloomError(f"unknown cache '{cache}'.{near(cache, CACHES)} Allowed: {', '.join(CACHES)}")


def _streamer(tokenizer: Any, write: Callable[[str], Any]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

"""Generation with a cache: the prefill of a context, then one token at a time.

A layer is called as generation calls it: the context at once with an empty `hl.Cache`, then token by token with that
cache, which grows. Variants take turns at every token, so that they stand at the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headloom.bench.asked import Named, Sizes, check_counts
from headloom.bench.setting import Setting
from headloom.bench.speed import interleaved
from headloom.bench.subjects import Subject, configs_of, inputs, subject
from headloom.ops.cache import Cache

TOKENS = 16
"""Timed tokens after a context."""


class _Session:
    """One subject's generation."""

    def __init__(self, each: Subject, x_BTD: torch.Tensor) -> None:
        self.module, self.x_BTD = each.module.eval(), x_BTD
        self.cache = Cache()

    @torch.no_grad()
    def prefill(self) -> None:
        self.cache = Cache()
        self.module(self.x_BTD, cache=self.cache)

    @torch.no_grad()
    def token(self) -> None:
        self.module(self.x_BTD[:, -1:], cache=self.cache)


def decode(
    variants: Sequence[Named],
    sizes: Sizes,
    setting: Setting,
    *,
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    new_tokens: int = TOKENS,
) -> list[dict[str, Any]]:
    """Rows: seconds of the prefill and of a token, of one layer; tokens a second (the batch's, through one layer);
    bytes the cache held after the prefill. Ratios are over the first variant."""
    check_counts({"contexts": contexts, "batch-size": batch_sizes, "new-tokens": [new_tokens]})
    for S in contexts:
        for named in variants:
            configs_of(named, sizes, S)
    rows: list[dict[str, Any]] = []
    for S in contexts:
        subjects = [subject(named, sizes, S, setting) for named in variants]
        for B in batch_sizes:
            x_BTD = inputs(B, S, sizes.hidden_size, setting)
            sessions = {each.label: _Session(each, x_BTD) for each in subjects}
            setting.say(f"prefill of {S:,} tokens x {B}")
            options: dict[str, Any] = {"warmup": setting.warmup, "device": setting.device}
            prefill = interleaved(
                {label: session.prefill for label, session in sessions.items()}, repeats=setting.repeats, **options
            )
            held = {label: session.cache.nbytes() for label, session in sessions.items()}
            setting.say(f"{new_tokens} tokens after {S:,} x {B}")
            token = interleaved(
                {label: session.token for label, session in sessions.items()}, repeats=new_tokens, **options
            )
            usual, done = subjects[0], len(rows)
            for each in subjects:
                share = each.layers / usual.layers
                taken = token[each.label].per(each.layers)
                rows.append(
                    {
                        "variant": each.label,
                        "context": S,
                        "batch_size": B,
                        "layers": each.layers,
                        "prefill_seconds": prefill[each.label].per(each.layers).to_dict(),
                        "prefill_ratio": prefill[each.label].over(prefill[usual.label]).per(share).spread(),
                        "token_seconds": taken.to_dict(),
                        "token_ratio": token[each.label].over(token[usual.label]).per(share).spread(),
                        "tokens_per_second": B / taken.median,
                        "cache_bytes": held[each.label] / each.layers,
                    }
                )
            setting.keep(rows[done:])
    return rows

"""Llama: q, k, v, o projections with one bias switch, half-split rotary over the whole head, causal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Decoder


class Llama(Decoder):
    name = "llama"
    attention = "LlamaAttention"

    def window(self, config: Any, index: int) -> int | None:
        return None  # a window in the config is ours and tells transformers' cache alone

    def own_config(
        self, sizes: dict[str, Any], windows: Sequence[int | None], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        if experts:
            given = ", ".join(f"{name}={value}" for name, value in experts.items())
            raise HeadloomError(f"a llama model has one feed-forward a layer, came {given}: use family='mixtral'")
        widths = {w for w in windows if w is not None}
        if len(widths) != 1:
            return sizes  # none; or several, of which a config can say only one: the cache then keeps everything
        if None not in windows:
            return {**sizes, "sliding_window": widths.pop()}
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        return {**sizes, "sliding_window": widths.pop(), "layer_types": kinds}


FAMILY = Llama()

"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Llama's attention without biases over a mixture of feed-forwards.

Every layer has E feed-forwards ("experts"); a linear router sends each token to the best k of them, weighted by the
softmax over these k. One window serves all layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Decoder

EXPERTS, EXPERTS_PER_TOKEN = 8, 2  # as published


class Mixtral(Decoder):
    name = "mixtral"
    attention = "MixtralAttention"

    def routers(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        return (layer.get_submodule("mlp.gate"),)

    def window(self, config: Any, index: int) -> int | None:
        return config.sliding_window

    def own_config(
        self, sizes: dict[str, Any], windows: Sequence[int | None], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        count = experts.get("experts", EXPERTS)
        chosen = experts.get("experts_per_token", EXPERTS_PER_TOKEN)
        if not 1 <= chosen <= count:
            raise HeadloomError(f"experts_per_token must be from 1 to the number of experts {count}, not {chosen}")
        sizes = {**sizes, "num_local_experts": count, "num_experts_per_tok": chosen}
        # one window for all layers is all that the config can say; where they differ, the cache keeps everything
        return {**sizes, "sliding_window": windows[0] if len(set(windows)) == 1 else None}


FAMILY = Mixtral()

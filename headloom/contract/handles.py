"""What `read` gives to `score`: a mechanism that need not expand all keys and values for it has a handle of its own."""

from __future__ import annotations

import dataclasses

from torch import Tensor


class Handle:
    """All that queries need of the tokens seen. `Attention.expand` opens it: k (B, G, S, K) and v (B, G, S, V)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Whole(Handle):
    """Keys and values of whole heads: k (B, G, S, K), v (B, G, S, V), ready to be scored."""

    k: Tensor
    v: Tensor

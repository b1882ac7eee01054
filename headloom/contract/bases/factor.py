"""Base tpa: tensor products (arXiv:2501.06425). `headloom.mechanism.tpa` is its page."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Annotated

from torch import Tensor

from headloom.contract.bases.base import BASES, PROJECTIONS, Base, no_norm, one_of_each
from headloom.contract.common import FILLED, CommonOptions, Filled, need
from headloom.contract.layer import Layer
from headloom.ops.factors import mean_product
from headloom.ops.mixing import mix_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorOptions(CommonOptions):
    """The options of base tpa."""

    q_rank: Annotated[int | None, "R_q: factors of the queries, at most min(H, K). None: 6; none with kv_only"] = None
    k_rank: Annotated[Filled[int], "R_k: factors of the keys, at most min(H, K). None: 2"] = FILLED
    v_rank: Annotated[Filled[int], "R_v: factors of the values, at most min(H, V). None: 2"] = FILLED
    kv_only: Annotated[Filled[bool], "queries are ordinary, not made of factors. None: false"] = FILLED


class FactorBase(Base[FactorOptions]):
    """value_h = (1/R) sum_r A[r, h] B[r]. A cache stores the factors of k and v: A (R, H), and B (R, K), which
    positions turn."""

    options = FactorOptions
    tiny = MappingProxyType({"q_rank": 5, "k_rank": 2, "v_rank": 3})
    settles = ("num_kv_heads", "qk_norm")
    turned = "k_b"

    def check_heads(self, config: CommonOptions) -> None:
        one_of_each(config)

    def complete(self, config: FactorOptions) -> None:
        config.fill("value_dim", config.head_dim)
        config.fill("kv_only", False)
        no_norm(config)
        bounds = {"q_rank": (6, config.head_dim), "k_rank": (2, config.head_dim), "v_rank": (2, config.value_dim)}
        if config.kv_only:
            need(
                config.q_rank is None,
                f"q_rank {config.q_rank} has no meaning with kv_only: its queries have no factors",
            )
            del bounds["q_rank"]
        for name, (default, width) in bounds.items():
            most = min(config.num_heads, width)
            config.fill(name, min(default, most))
            value = getattr(config, name)
            need(value <= most, f"{name} must be at most {most}, the smaller of heads and their width, not {value}")

    def build(self, attn: Layer[FactorOptions]) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        ranks = {"k": (c.k_rank, c.head_dim), "v": (c.v_rank, c.value_dim)}
        if c.q_rank is None:
            attn.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        else:
            ranks = {"q": (c.q_rank, c.head_dim), **ranks}
        for letter, (rank, width) in ranks.items():
            attn.add_module(f"{letter}_a", linear(c.hidden_size, rank * c.num_heads, bias=c.qkv_bias))
            attn.add_module(f"{letter}_b", linear(c.hidden_size, rank * width, bias=c.qkv_bias))

    def slots(self, config: FactorOptions) -> dict[str, tuple[int, int]]:
        c = config
        k, v = c.k_rank, c.v_rank
        return {"k_a": (k, c.num_heads), "k_b": (k, c.head_dim), "v_a": (v, c.num_heads), "v_b": (v, c.value_dim)}

    def project(self, attn: Layer[FactorOptions], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        c = attn.config

        def factor(name: str, rank: int) -> Tensor:
            ranks: Tensor = getattr(attn, name)(x_BTD).unflatten(-1, (rank, -1))
            return ranks.transpose(1, 2)

        if c.q_rank is None:
            q = attn.q_proj(x_BTD).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        else:
            q = mean_product(factor("q_a", c.q_rank), factor("q_b", c.q_rank))
        return q, {name: factor(name, rank) for name, (rank, _) in self.slots(c).items()}

    def expand(self, attn: Layer[FactorOptions], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return mean_product(slots["k_a"], slots["k_b"]), mean_product(slots["v_a"], slots["v_b"])

    def mixed(
        self, attn: Layer[FactorOptions], slots: dict[str, Tensor], k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Heads are mixed in the A factors, R numbers a head instead of K."""
        k_a = mix_heads(k_weight, slots["k_a"].transpose(1, 3)).transpose(1, 3)
        v_a = mix_heads(v_weight, slots["v_a"].transpose(1, 3)).transpose(1, 3)
        return mean_product(k_a, slots["k_b"]), mean_product(v_a, slots["v_b"])


BASES.add("tpa", FactorBase())

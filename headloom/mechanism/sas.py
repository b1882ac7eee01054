"""Simulated Attention Score. arXiv:2507.07694.

More heads (E) and wider queries and keys (J) than the base has, simulated per token; nothing mixes over time.
From q, k, v of H (k, v: G) heads of width K:

1. Heads (code): y = Conv_{H->E}(x); y = y + Conv_{E->E}(relu(y)). The heads are the channels; the convolution slides
   over the FEATURE axis with an odd kernel (1 = a linear map over heads), zero padding, biases; q, k, v apart.
2. Features (code), q and k only: z = Lin_{K->J}(y); z = z + Lin_{J->J}(relu(z)), shared by all heads, biases.
3. Softmax attention (code): E heads, query and key width J, value width V, scale 1/sqrt J.
4. PEAA, aggregate "mean" (code): the E outputs as r = E / H groups of H heads (e = i H + h), the same W_O on each and
   the mean over groups; equal to averaging first, which we do. "nonlinear": per feature an MLP with biases over the
   heads, E -> E, GELU, E -> H (a row that sees nothing stays 0). "full": W_O of E V x D, the costly alternative.

order "head_first" (paper) does 1 then 2, "feature_first" 2 then 1. Rotary (ours; the published code has none): after
the simulation, on the first K of the J features at their usual frequencies; over mla, whose features stand as [rotary ;
plain] and are K = K_r + K_n wide, on the first K_r. Cache per token: "expanded" E (J + V), or
"base": the base's slots unrotated, simulated again on reading.

Initialisation: "default" = PyTorch's. "identity" (ours, exact for aggregate mean and full): the first convolution tiles
the heads at its centre tap, the first linear embeds K into J (times sqrt(J/K) on q), its further rows zero for q and
PyTorch's for k (zero on both sides would have zero gradient for ever), residual second maps and biases zero; v's copies
are told apart by a perturbation of `head_v.0.weight`, N(0, init_std), that sums to zero over a head's copies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import FactorOptions, LatentOptions
from headloom.contract.common import FILLED, Filled, need
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Handle, Whole
from headloom.contract.pictures import Picture, names
from headloom.ops.cache import Seen
from headloom.ops.mixing import mix_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class SASConfig(LatentOptions, FactorOptions, AttentionConfig):
    """As `AttentionConfig` with the options of bases mla and tpa, and what follows."""

    simulated_heads: Annotated[Filled[int], "E: simulated heads, a multiple of H. None: 3 H"] = FILLED
    simulated_width: Annotated[
        Filled[int], "J: the width of a simulated query and key, even, at least K. None: 1.25 K, made even"
    ] = FILLED
    kernel_size: Annotated[int, "the width of the convolutions that make heads, odd; 1: a linear map over heads"] = 5
    order: Annotated[
        Literal["head_first", "feature_first"], "what is made first: more heads, as the paper, or wider features"
    ] = "head_first"
    aggregate: Annotated[
        Literal["mean", "nonlinear", "full"],
        "how simulated heads become H heads: their mean, an MLP over heads, or an output projection that reads all",
    ] = "mean"
    init: Annotated[
        Literal["default", "identity"], "PyTorch's own start, or one that computes what the plain heads would"
    ] = "default"
    init_std: Annotated[float, "init identity: the size of the random numbers that tell the values' copies apart"] = 0.3
    cache: Annotated[
        Literal["expanded", "base"], "what a cache keeps: simulated keys and values, or the base's (smaller, slower)"
    ] = "expanded"

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa", "mla", "tpa")

    def __post_init__(self) -> None:
        super().__post_init__()
        H, K = self.num_heads, self.query_dim
        self.fill("simulated_heads", 3 * H)
        self.fill("simulated_width", 2 * math.ceil(1.25 * K / 2))
        E, J = self.simulated_heads, self.simulated_width
        need(E >= H and E % H == 0, f"simulated_heads must be a multiple of num_heads {H}, not {E}")
        need(J >= K and J % 2 == 0, f"simulated_width must be even and at least {K}, the base's query width, not {J}")
        need(
            self.kernel_size >= 1 and self.kernel_size % 2 == 1,
            f"kernel_size must be odd (1, 3, 5, 7, ...), not {self.kernel_size}",
        )
        need(self.init_std >= 0, f"init_std must be at least 0, not {self.init_std}")
        need(
            not (self.init == "identity" and self.aggregate == "nonlinear"),
            "init 'identity' cannot be exact with aggregate 'nonlinear': use aggregate 'mean' or 'full'",
        )

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"simulated_heads": 12, "simulated_width": 14, "kernel_size": 3, **changes})

    @classmethod
    def graft_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"init": "identity"}

    @property
    def exact(self) -> bool:
        return self.init == "identity"


class SAS(Attention[SASConfig]):
    """Simulated Attention Score: E heads of width J simulated from H heads of width K."""

    name = "sas"
    title = "Simulated Attention Score"
    paper = "arXiv:2507.07694"
    summary = "more heads and wider queries and keys, simulated by small convolutions and MLPs"
    flops_class = "E/H T^2"
    config_cls = SASConfig

    o_proj: nn.Linear
    head_q: Any
    head_k: Any
    head_v: Any
    head_o: Any
    feature_q: Any
    feature_k: Any

    @property
    def merged_width(self) -> int:
        c = self.config
        return (c.simulated_heads if c.aggregate == "full" else c.num_heads) * c.value_dim

    def build_heads(self) -> None:
        c = self.config
        H, G, E, K, J = c.num_heads, c.num_kv_heads, c.simulated_heads, c.query_dim, c.simulated_width

        def convolutions(heads: int) -> nn.ModuleList:
            conv = functools.partial(nn.Conv1d, kernel_size=c.kernel_size, padding=c.kernel_size // 2)
            return nn.ModuleList([conv(heads, E), conv(E, E)])

        self.head_q, self.head_k, self.head_v = convolutions(H), convolutions(G), convolutions(G)
        self.feature_q = nn.ModuleList([nn.Linear(K, J), nn.Linear(J, J)])
        self.feature_k = nn.ModuleList([nn.Linear(K, J), nn.Linear(J, J)])
        if c.aggregate == "nonlinear":
            self.head_o = nn.ModuleList([nn.Linear(E, E), nn.Linear(E, H)])

    @torch.no_grad()
    def reset_heads(self) -> None:
        c = self.config
        pairs: list[Any] = [pair for pair in self.children() if isinstance(pair, nn.ModuleList)]
        for pair in pairs:
            for module in pair:
                module.reset_parameters()
        if c.init == "default":
            return
        E, H, K, J = c.simulated_heads, c.num_heads, c.query_dim, c.simulated_width
        weight: Any = self.head_v[0].weight
        weight.normal_(0, c.init_std)
        copies = weight.view(E // H, H, *weight.shape[1:])
        copies.sub_(copies.mean(0))
        centre = c.kernel_size // 2
        for pair, group in ((self.head_q, 1), (self.head_k, c.group), (self.head_v, c.group)):
            if pair is not self.head_v:
                pair[0].weight.zero_()
            e = torch.arange(E, device=weight.device)
            pair[0].weight[e, e % H // group, centre] += 1
            for x in (pair[0].bias, pair[1].weight, pair[1].bias):
                x.zero_()
        wider = math.sqrt(J / K) if c.scale is None else 1.0  # the scale that follows the width is made up for
        for pair, factor in ((self.feature_q, wider), (self.feature_k, 1.0)):
            pair[0].weight[:K] = torch.eye(K, device=weight.device, dtype=weight.dtype) * factor
            if pair is self.feature_q:
                pair[0].weight[K:].zero_()
            for x in (pair[0].bias, pair[1].weight, pair[1].bias):
                x.zero_()
        if c.aggregate == "full" and E > H:  # every copy reads the same W_O, scaled to their mean
            blocks = self.o_proj.weight.view(c.hidden_size, E // H, -1)
            blocks.copy_(blocks[:, :1].clone().expand_as(blocks) / (E // H))

    def pictures(self) -> tuple[Picture, ...]:
        """The first maps over heads, by head (and tap of the convolution), and the first ones over features."""
        c = self.config
        E, K, J, taps = c.simulated_heads, c.query_dim, c.simulated_width, c.kernel_size
        found = []
        for letter, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
            columns = names(heads) if taps == 1 else names(heads, taps)
            across = "from head" if taps == 1 else "from head.tap"
            found.append(Picture(f"head_{letter}.0.weight", names(E), columns, "to simulated head", across))
        for letter in "qk":
            found.append(Picture(f"feature_{letter}.0.weight", names(J), names(K), "to feature", "from feature"))
        return tuple(found)

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        c = self.config
        if c.cache == "base":
            return super().cache_slots()
        return {"k": (c.simulated_heads, c.simulated_width), "v": (c.simulated_heads, c.value_dim)}

    # Steps -------------------------------------------------------------------------------------------------------

    def queries(self, q_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        return self.turn(self._simulate("q", q_BHTK), positions_BT, length)

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        if self.config.cache == "base":  # unrotated: simulation does not commute with rotation
            return slots
        k, v = self._simulated(slots)
        return {"k": k if self.turns_late else self.turn(k, positions_BT, None), "v": v}

    @property
    def turns_late(self) -> bool:
        # not super().turns_late: torch.compile takes a property of super() for true (torch 2.13)
        return self.rotary is not None and (self.rotary.length_dependent or self.config.cache == "base")

    def read(self, seen: Seen, length: int | None) -> Handle:
        base = self.config.cache == "base"
        k, v = self._simulated(seen.slots) if base else (seen.slots["k"], seen.slots["v"])
        return Whole(self.turn(k, seen.positions_BS, length) if base or length is not None else k, v)

    def _simulated(self, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        k, v = self.base.expand(self, slots)
        return self._simulate("k", k), self._heads(self.head_v, v)

    def merge(self, out_BETV: Tensor, x_BTD: Tensor) -> Tensor:
        c = self.config
        if c.aggregate == "full":
            return out_BETV
        if c.aggregate == "mean":
            copies: Tensor = out_BETV.unflatten(1, (-1, c.num_heads))
            return copies.mean(1)
        hidden = F.gelu(self.head_o[0](out_BETV.movedim(1, -1)))
        sees = (out_BETV != 0).any(dim=(1, 3))[:, None, :, None]  # a row that sees nothing stays 0, despite the biases
        heads: Tensor = self.head_o[1](hidden).movedim(-1, 1)
        return heads * sees

    def _simulate(self, letter: str, x_BHTK: Tensor) -> Tensor:
        heads, features = getattr(self, f"head_{letter}"), getattr(self, f"feature_{letter}")
        if self.config.order == "head_first":
            return self._features(features, self._heads(heads, x_BHTK))
        return self._heads(heads, self._features(features, x_BHTK))

    @staticmethod
    def _heads(pair: nn.ModuleList, x_BHTK: Tensor) -> Tensor:
        y = _convolve(pair[0], x_BHTK)
        return y + _convolve(pair[1], F.relu(y))

    @staticmethod
    def _features(pair: nn.ModuleList, x_BHTK: Tensor) -> Tensor:
        z: Tensor = pair[0](x_BHTK)
        further: Tensor = pair[1](F.relu(z))
        return z + further

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        """The mean over a head's simulated copies, (B, H, T, S); values are simulated without being linear in v."""
        if self.config.aggregate == "nonlinear":
            return None
        copies: Tensor = patterns.unflatten(1, (-1, self.config.num_heads))
        return copies.mean(1)


def _convolve(conv: Any, x_BHTK: Tensor) -> Tensor:
    """The convolution over features with heads as channels, for all tokens at once: a (1, kernel) filter over the
    plane of tokens and features, or one product over heads at kernel 1. `conv`: a Conv1d, or what PEFT has put around
    it, with its attributes."""
    if conv.kernel_size[0] == 1:
        bias: Tensor = conv.bias[:, None, None].to(x_BHTK.dtype)
        return mix_heads(conv.weight[..., 0], x_BHTK) + bias
    return F.conv2d(x_BHTK, conv.weight.unsqueeze(2), conv.bias, padding=(0, conv.kernel_size[0] // 2))

"""Interleaved Head Attention. arXiv:2602.21371.

Pseudo-heads are learned mixes of all heads, interleaved in the sequence; a head gets up to P^2 patterns.

1. Mix (paper): q~_{h,p} = sum_m q_mix[h,p,m] q_m, k~_{h,p} = sum_g k_mix[h,p,g] k_g, v~ likewise. Static weights
   q_mix (H,P,H), k_mix and v_mix (H,P,G) over the head axis only. G < H is ours; the paper has G = H.
2. Interleave (paper): token n becomes the pseudo-tokens (n,0) .. (n,P-1); each head attends over T*P of them.
3. Rotate after mixing. phase "virtual" (paper): pseudo p of position n stands at n P + p; "token" (ours): at n.
4. Softmax attention per head. order "virtual" (paper: causal on the expanded sequence): (n,p) sees (n',p') iff
   n' P + p' <= n P + p; "token" (ours): iff n' <= n. Windows, documents and padding are stated in real tokens.
5. Collapse. "full" (paper's definition): o_h = sum_{g,p} out_mix[h,g,p] o~_{g,p}; "head" (paper's algorithm box):
   o_h = sum_p out_mix[h,p] o~_{h,p}; "mean": the mean over p, no parameter.
6. Concatenate, W_O.

interaction "paired" is the other published reading: H*P independent heads, pseudo-query p meets only pseudo-key p,
collapse "mean", phase "token", order without meaning.

Extra parameters H P (H + 2 G), and H^2 P for collapse full (H P for head). The attention core costs P^2 times mha's
(paired: P times). Cache per token: the base's, mixed on reading (ours; a few queries
meet it unmixed), or "expanded": P H (K + V). The base's is
G (K + V); over mla C + K_r, the shared rotary key mixed as every head's and turned by p in its K_r features alone; over
tpa (k_rank + v_rank) of H + K, the A factors being what is mixed.

Initialisation (ours; the paper is silent). A graft must keep the function, and pseudo-heads must not stay copies.
"identity": q_mix and k_mix the identity for every p, v_mix identity + e with sum_p e = 0, out_mix identity / P + c with
sum_p c = 0; exact with order and phase "token". "carrier": the last pseudo-query is the identity and the only one
collapsed, pseudo-query p < P-1 of head h reads head (h+1+p) mod H; exact with phase "token" in both orders.
"normal": N(0, 0.02). e, c ~ N(0, init_std), centred; for collapse "head" c's is at least 1/P, so that both signs occur.
Grafts take init_std 0.1 unless told otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from headloom.contract.attention import Attention
from headloom.contract.bases import FactorOptions, LatentOptions
from headloom.contract.common import FILLED, Filled, need
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding, Linear, Plain, mix_inputs, mix_outputs
from headloom.contract.handles import Handle, Whole
from headloom.contract.pictures import Picture, names
from headloom.ops import absorbed
from headloom.ops.cache import Seen
from headloom.ops.masks import Visibility
from headloom.ops.mixing import Mix, mix_heads
from headloom.ops.rotary import rotate

NORMAL_STD = 0.02  # of init="normal", the published paired form's
Places = TypeVar("Places", Tensor, int, int | None)
FEW = 8  # pseudo-queries that meet a base cache as it is: P times the products of mixing it, and none of its memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class IHAConfig(LatentOptions, FactorOptions, AttentionConfig):
    """As `AttentionConfig` with the options of bases mla and tpa, and what follows."""

    pseudo_heads: Annotated[
        Filled[int], "P: pseudo-heads of each head. None: H, as the paper; scores then cost H^2 times those of mha"
    ] = FILLED
    interaction: Annotated[
        Literal["interleaved", "paired"],
        "every pseudo-query meets all pseudo-keys of a token, or only the one of its own number",
    ] = "interleaved"
    order: Annotated[
        Literal["virtual", "token"],
        "what is causal: the interleaved sequence of pseudo-tokens, or whole tokens, which see all their own",
    ] = "virtual"
    phase: Annotated[
        Filled[Literal["virtual", "token"]],
        "where a pseudo-token stands for the rotary embedding: at a place of its own, or at its token's. "
        "None: virtual; token when paired",
    ] = FILLED
    collapse: Annotated[
        Filled[Literal["full", "head", "mean"]],
        "how pseudo-heads become heads again: a mix over all heads, over a head's own, or their mean. "
        "None: full; mean when paired",
    ] = FILLED
    init: Annotated[
        Literal["identity", "carrier", "normal"],
        "how the mixes start: as plain heads that are told apart by small numbers; so that a graft changes nothing in "
        "any order; or all random, as published for paired",
    ] = "identity"
    init_std: Annotated[float, "the size of the random numbers that tell pseudo-heads apart at the start"] = 0.3
    cache: Annotated[
        Literal["base", "expanded"], "what a cache keeps: the keys and values before mixing (smaller), or mixed"
    ] = "base"

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa", "mla", "tpa")

    def __post_init__(self) -> None:
        super().__post_init__()
        paired = self.interaction == "paired"
        self.fill("pseudo_heads", self.num_heads)
        self.fill("phase", "token" if paired else "virtual")
        self.fill("collapse", "mean" if paired else "full")
        P = self.pseudo_heads
        need(P >= 1, f"pseudo_heads must be at least 1, not {P}")
        need(self.init_std >= 0, f"init_std must be at least 0, not {self.init_std}")
        if paired:
            need(self.collapse == "mean", f"interaction 'paired' collapses by 'mean', not '{self.collapse}'")
            need(self.phase == "token", f"interaction 'paired' has phase 'token', not '{self.phase}'")
            need(
                self.init != "carrier",
                "init 'carrier' needs collapse 'full' or 'head'; paired takes identity or normal",
            )
        elif self.collapse == "mean":
            need(
                self.init == "normal" or P == 1,
                f"collapse 'mean' with init '{self.init}' would keep the pseudo-queries equal for ever: "
                "use init 'normal', or collapse 'full' or 'head'",
            )
        if self.init == "carrier":
            need(
                self.phase == "token" or self.rope_theta is None,
                "init 'carrier' needs phase 'token' (or no rotary), not 'virtual': init 'identity' goes with both",
            )

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"pseudo_heads": 3, **changes})

    @classmethod
    def graft_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        if given.get("interaction") == "paired":
            return {"init": "identity"}
        found = {"order": "token", "phase": "token", "init": "carrier", "init_std": 0.1}  # measured: docs/log.md
        if given.get("collapse") == "mean":  # no start keeps the function: full would, and is named by the refusal
            return {**found, "collapse": "full", "init": "normal"}
        return {**found, "init": "identity"} if given.get("phase") == "virtual" else found

    @property
    def exact(self) -> bool:
        if self.init == "normal":
            return False
        if self.pseudo_heads == 1 or self.interaction == "paired":
            return True
        unturned = self.phase == "token" or self.rope_theta is None
        return unturned and (self.init == "carrier" or self.order == "token" or not self.causal)

    def _folding(self) -> Folding:
        H, G, P = self.num_heads, self.num_kv_heads, self.pseudo_heads
        mixes = ["q_mix", "k_mix", "v_mix", *(["out_mix"] if self.collapse != "mean" else [])]
        if P != 1:
            why = f"{P} pseudo-heads a head attend to {P} pseudo-keys a token; plain attention has one of each"
            return Folding(stays=dict.fromkeys(mixes, why))
        if self.base not in ("gqa", "mha", "mqa"):
            return Folding(stays=dict.fromkeys(mixes, f"base '{self.base}' has no projections of whole heads"))
        wider = "" if G == H else f", of {H} key/value heads instead of {G}"
        into = {"q_mix": "W_Q", "k_mix": f"W_K{wider}", "v_mix": f"W_V{wider}", "out_mix": "W_O"}
        normed = {"q_mix", "k_mix"} if self.qk_norm is not None else set()
        why = "the norm of queries and keys stands between it and the projection"
        return Folding(
            {mix: into[mix] for mix in mixes if mix not in normed}, {mix: why for mix in mixes if mix in normed}
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Unmixed(Handle):
    """What keys and values are mixed from: the base's slots, rotated, and the length that rotation took, if any."""

    slots: dict[str, Tensor]
    length: int | None


class IHA(Attention[IHAConfig]):
    """Interleaved Head Attention: P pseudo-heads per head, interleaved in the sequence."""

    name = "iha"
    title = "Interleaved Head Attention"
    paper = "arXiv:2602.21371"
    summary = "pseudo-heads that mix all heads, interleaved in the sequence: P^2 patterns a head"
    flops_class = "P^2 T^2"
    config_cls = IHAConfig

    def build_heads(self) -> None:
        c = self.config
        H, G, P = c.num_heads, c.num_kv_heads, c.pseudo_heads
        self.paired = c.interaction == "paired"
        self.rows_per_token = 1 if self.paired else P
        self.rows_causal = c.causal and c.order == "virtual" and not self.paired
        self.q_mix, self.k_mix, self.v_mix = Mix(H, P, H), Mix(H, P, G), Mix(H, P, G)
        if c.collapse != "mean":
            self.out_mix = Mix(*((H, H, P) if c.collapse == "full" else (H, P)))

    @torch.no_grad()
    def reset_heads(self) -> None:
        c = self.config
        H, P = c.num_heads, c.pseudo_heads
        mixes = [self.q_mix, self.k_mix, self.v_mix, *([self.out_mix] if c.collapse != "mean" else [])]
        if c.init == "normal":
            for mix in mixes:
                mix.weight.normal_(0, NORMAL_STD)
            return
        heads = torch.eye(H, device=self.q_mix.weight.device, dtype=self.q_mix.weight.dtype)
        base = heads.reshape(H, c.num_kv_heads, c.group).sum(-1)  # 1 at g = h // (H / G)
        self.q_mix.weight.copy_(heads[:, None].expand(H, P, H))
        self.k_mix.weight.copy_(base[:, None].expand_as(self.k_mix.weight))
        _zero_sum(self.v_mix.weight, c.init_std, axis=1)
        self.v_mix.weight.add_(base[:, None])
        if c.init == "carrier":
            for p in range(P - 1):
                self.q_mix.weight[:, p] = heads.roll(-1 - p, dims=0)  # head h reads head (h + 1 + p) mod H
            if c.collapse != "mean":  # P = 1: the mean of one
                last = torch.eye(P, device=heads.device, dtype=heads.dtype)[P - 1]
                self.out_mix.weight.copy_(heads[..., None] * last if c.collapse == "full" else last.expand(H, P))
        elif c.collapse != "mean":
            # a mix over one head's pseudo-queries must have some negative weights, or it only averages
            std = c.init_std if c.collapse == "full" else max(c.init_std, 1 / P)
            _zero_sum(self.out_mix.weight, std, axis=-1)
            self.out_mix.weight.add_((heads[..., None] if c.collapse == "full" else 1) / P)

    def pictures(self) -> tuple[Picture, ...]:
        """The mixes by head and pseudo-head."""
        c = self.config
        H, G, P = c.num_heads, c.num_kv_heads, c.pseudo_heads
        pseudo, to = names(H, P), "to head.pseudo-head"
        mixes = (("q_mix", "from head", H), ("k_mix", "from key head", G), ("v_mix", "from value head", G))
        found = [Picture(f"{name}.weight", pseudo, names(heads), to, across) for name, across, heads in mixes]
        if c.collapse == "full":
            found.append(Picture("out_mix.weight", names(H), pseudo, "to head", "from head.pseudo-head"))
        elif c.collapse == "head":
            found.append(Picture("out_mix.weight", names(H), names(P), "to head", "from its pseudo-head"))
        return tuple(found)

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        c = self.config
        if c.cache == "base":
            return super().cache_slots()
        heads = c.num_heads * c.pseudo_heads
        return {"k": (heads, c.query_dim), "v": (heads, c.value_dim)}

    # Steps -------------------------------------------------------------------------------------------------------
    # Rotation by a token's position commutes with mixing: base keys are rotated (and cached) at n P, or n, and the
    # extra turn by p, constant in n, is applied to what was mixed.

    def queries(self, q_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        q = self.turn(q_BHTK, self._scaled(positions_BT), self._scaled(length))
        return self._split(self._extra_turn(mix_heads(self._rows(self.q_mix), q), self._scaled(length)))

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        slots = self.turn_early(slots, self._scaled(positions_BT))
        if self.config.cache == "base":
            return slots
        k, v = self._mixed(slots)
        late = self.rotary is not None and self.rotary.length_dependent
        return {"k": k if late else self._extra_turn(k, None), "v": v}

    def read(self, seen: Seen, length: int | None) -> Handle:
        """The mixed keys and values, or with the base cache `Unmixed`."""
        places, reach = self._scaled(seen.positions_BS), self._scaled(length)
        if self.config.cache == "base":
            return Unmixed(self.turn_late(seen.slots, places, reach), reach)
        k, v = seen.slots["k"], seen.slots["v"]
        return Whole(k if length is None else self._extra_turn(self.turn(k, places, reach), reach), v)

    def expand(self, handle: Handle) -> tuple[Tensor, Tensor]:
        if isinstance(handle, Unmixed):
            k, v = self._mixed(handle.slots)
            k = self._extra_turn(k, handle.length)
        else:
            k, v = super().expand(handle)
        return self._split(k), self._split(v)

    def score(self, q: Tensor, handle: Handle, visibility: Visibility) -> Tensor:
        """A few queries over a base cache meet what is remembered, without mixing all of it."""
        c = self.config
        few = not self.paired and visibility.past > 0 and visibility.T * c.pseudo_heads <= FEW
        if not isinstance(handle, Unmixed) or not few:
            return super().score(q, handle, visibility)
        q = q.unflatten(2, (-1, c.pseudo_heads)).unsqueeze(4)
        return absorbed.attend(
            self._turned_back(q, handle.length),
            *self.base.expand(self, handle.slots),
            self.k_mix.weight,
            self.v_mix.weight,
            visibility,
            scale=self._scale(q),
            rows_causal=self.rows_causal,
            kind=c.score,
            softcap=c.softcap,
            dropout=c.dropout if self.training else 0.0,
        )

    def merge(self, out_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        c = self.config
        if self.paired:
            pairs: Tensor = out_BHTV.unflatten(1, (c.num_heads, c.pseudo_heads))
            return pairs.mean(2)
        out: Tensor = out_BHTV.unflatten(2, (-1, c.pseudo_heads))  # (B, H, T, P, V)
        if c.collapse == "mean":
            return out.mean(3)
        if c.collapse == "head":
            return (out * self.out_mix.weight[:, None, :, None].to(out.dtype)).sum(3)
        weight = self.out_mix.weight.transpose(1, 2).flatten(1)  # (H, P H)
        return mix_heads(weight, out.permute(0, 3, 1, 2, 4).flatten(1, 2))

    def fold_into(self, weights: Mapping[str, Linear]) -> Plain:
        """P = 1: every mix is one matrix over heads. The folded attention has H key/value heads."""
        o = weights["o"]
        if self.config.collapse != "mean":
            out = self.out_mix.weight.squeeze(-1)  # (H, H), or (H,)
            o = mix_inputs(out if out.ndim == 2 else out.diag(), o)
        q, k, v = (
            mix_outputs(mix.weight.squeeze(1), weights[letter])
            for letter, mix in (("q", self.q_mix), ("k", self.k_mix), ("v", self.v_mix))
        )
        return Plain(q, k, v, o, self.config.num_heads)

    def _mixed(self, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.base.mixed(self, slots, self._rows(self.k_mix), self._rows(self.v_mix))

    def _rows(self, mix: Mix) -> Tensor:
        """The mix as a matrix (P H, heads): rows by pseudo-head, then by head, as `_split` takes them; by head, then by
        pseudo-head, when paired."""
        return mix.weight.flatten(0, 1) if self.paired else mix.weight.transpose(0, 1).flatten(0, 1)

    def _split(self, x_BXTK: Tensor) -> Tensor:
        """(B, P H, T, K) -> (B, H, T P, K): the interleaving, a view of the (B, T, P H, K) memory of a mix."""
        if self.paired:
            return x_BXTK
        x_BTPHK: Tensor = x_BXTK.transpose(1, 2).unflatten(2, (self.rows_per_token, -1))
        return x_BTPHK.flatten(1, 2).transpose(1, 2)

    def _scaled(self, places: Places) -> Places:
        """Positions (or a length) in tokens, scaled by P where the phase is virtual: those of first pseudo-tokens."""
        if places is None or self.config.phase == "token":
            return places
        return places * self.config.pseudo_heads

    def _extra_turn(self, x_BXTK: Tensor, length: int | None) -> Tensor:
        if not self._turns_further:
            return x_BXTK
        places = torch.arange(self.config.pseudo_heads, device=x_BXTK.device).repeat_interleave(self.config.num_heads)
        cos, sin = self.rotary.tables(places, x_BXTK.dtype, length=length, factor=False)  # type: ignore[union-attr]
        return rotate(x_BXTK, (cos[None, :, None], sin[None, :, None]))

    def _turned_back(self, q_BHTP1K: Tensor, length: int | None) -> Tensor:
        """(B, H, T, P, P, K): instead of pseudo-key p, the query it meets is turned, by -p."""
        P = self.config.pseudo_heads
        q = q_BHTP1K.expand(-1, -1, -1, -1, P, -1)
        if not self._turns_further:
            return q
        cos, sin = self.rotary.tables(torch.arange(P, device=q.device), q.dtype, length=length, factor=False)  # type: ignore[union-attr]
        return rotate(q, (cos, -sin))

    @property
    def without_weights(self) -> str:
        P = self.rows_per_token
        return f"its {P} pseudo-heads give a head {P * P} of them for every two tokens" if P > 1 else ""

    @property
    def _turns_further(self) -> bool:
        return self.rotary is not None and self.config.phase == "virtual" and self.config.pseudo_heads > 1

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        """M[h,m,n,n'] = sum_{g,p,p'} out_mix[h,g,p] A_g[(n,p),(n',p')] v_mix[g,p',m]; out_h = sum_m M[h,m] v_m."""
        c = self.config
        P, v_mix = c.pseudo_heads, self.v_mix.weight.to(patterns.dtype)
        if self.paired:
            return torch.einsum("bhpts,hpm->bhmts", patterns.unflatten(1, (-1, P)), v_mix) / P
        A = patterns.unflatten(-1, (-1, P)).unflatten(2, (-1, P))  # (B, H, T, P, S, P)
        if c.collapse == "full":
            return torch.einsum("hgp,bgtpsq,gqm->bhmts", self.out_mix.weight.to(A.dtype), A, v_mix)
        weight = A.new_full((c.num_heads, P), 1 / P) if c.collapse == "mean" else self.out_mix.weight
        return torch.einsum("hp,bhtpsq,hqm->bhmts", weight.to(A.dtype), A, v_mix)


def _zero_sum(weight: Tensor, std: float, axis: int) -> None:
    """N(0, std), centred so that it sums to zero over the pseudo-heads."""
    weight.normal_(0, std)
    weight.sub_(weight.mean(axis, keepdim=True))

"""The contract: the dataflow of attention, written once.

    project -> remember -> heads -> simulate -> rotate -> score -> merge -> output

A mechanism is one file with a config and a subclass that overrides only the steps in which it differs. The steps:

    project  x (B, T, D) -> q (B, H, T, K) and the base's slots of this call's tokens (k and v, or what they come from)
    write    the base's slots -> the slots a cache remembers
    remember the slots of this call's tokens and the cache -> all slots remembered
    queries  q -> the queries scored
    read     all slots remembered -> the keys and values scored
    score    -> (B, heads, T, V): `expand` to full keys and values, then the `core`, where tokens meet
    merge    the scored heads, and the queries' own x -> (B, H, T, V)
    output   concatenate heads, o_proj -> (B, T, D)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headloom.contract.arguments import as_mask, check_cache, check_input, check_rows, check_token_data
from headloom.contract.bases import BASES, Base
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Linear, Plain
from headloom.contract.pictures import Picture, names
from headloom.core.errors import HeadloomError
from headloom.ops import blocks
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Mask, Visibility, expand_pseudo, given_once, sort_rules
from headloom.ops.mixing import Mix
from headloom.ops.rotary import Rotary, rotate
from headloom.ops.scores import attend
from headloom.ops.tokens import cover, place


@dataclasses.dataclass(frozen=True, eq=False)
class Maps:
    """What an attention does to tokens.

    patterns: every attention pattern (B, heads, T, S): the base's heads, sas' E simulated heads, iha's heads over
        pseudo-tokens (B, H, T P, S P), or its H P pairs when paired, head-major. Rows sum to 1 (0: sees nothing),
        or to `Attention.row_sums()` where a mechanism mixes weights.
    effective: the per-token map (B, H, G, T, S) with out_h = sum_g effective[h, g] v_g over the base's values; sas'
        values are not linear in the base's, so there it is (B, H, T, S), the mean over a head's simulated copies;
        None where the merge is not linear.
    """

    patterns: Tensor
    effective: Tensor | None

    def __repr__(self) -> str:
        effective = None if self.effective is None else tuple(self.effective.shape)
        return f"Maps(patterns {tuple(self.patterns.shape)}, effective {effective})"


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """One call, ready to be scored."""

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility


class Attention(nn.Module):
    """Base of all mechanisms: plain grouped-query attention, out = concat_h(softmax(q_h k_g^T scale) v_g) W_O.

    `layer_index` tells the cache (and mechanisms whose constants depend on depth) which layer this is. A `base` that is
    given holds its projections already: nothing is initialised then, and `reset_heads` is left to the caller.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    #: for `headloom list`: how FLOPs between tokens grow, where "T^2" or "T", which it measures, is not the whole of it
    flops_class: ClassVar[str] = ""
    config_cls: ClassVar[type[AttentionConfig]] = AttentionConfig

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: Any
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, config: AttentionConfig, layer_index: int = 0, *, base: Base | None = None):
        super().__init__()
        if not isinstance(config, self.config_cls):
            raise TypeError(f"{type(self).__name__} takes a {self.config_cls.__name__}, not {type(config).__name__}")
        self.config: Any = config
        self.layer_index = layer_index
        self.base = BASES[config.base] if base is None else base
        self.rotary = None
        if config.rope_theta is not None:
            assert config.rotary_dim is not None
            self.rotary = Rotary(config.rope_theta, config.rotary_dim, config.rope_scaling)
        self.base.build(self)
        self.base.build_output(self)
        before = set(self._modules)
        self.build_heads()
        #: the children that simulate heads, beside the base's
        self.simulating = tuple(name for name in self._modules if name not in before)
        if base is None and not next(chain(self.parameters(), self.buffers())).is_meta:
            self.reset_parameters()

    # What a mechanism may override ------------------------------------------------------------------------------

    #: pseudo-tokens per token (P of iha) and whether they are causal among themselves
    pseudo: int = 1
    virtual: bool = False

    @property
    def merged_width(self) -> int:
        """Width that o_proj reads."""
        return self.config.num_heads * self.config.value_dim

    def build_heads(self) -> None:
        """Create the modules that simulate heads."""

    def reset_heads(self) -> None:
        """Initialise what `build_heads` created; a graft calls it and keeps the base's weights.

        Where o_proj reads more than the base gives, the base's weights stand in its first columns; spread them here.
        """

    def pictures(self) -> tuple[Picture, ...]:
        """The learned weights that a report shows, before and after training: every `Mix`, unless a mechanism knows
        better names for its rows and columns, or has other weights to show."""
        mixes = [(name, module.weight.shape) for name, module in self.named_modules() if isinstance(module, Mix)]
        return tuple(
            Picture(f"{name}.weight", names(shape[0]), names(*shape[1:]), "to", "from") for name, shape in mixes
        )

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        """Slots of one token: name -> (heads, width)."""
        return self.base.slots(self.config)

    def constant_slots(self) -> dict[str, tuple[int, int, int]]:
        """Slots whose size is the same for any number of tokens, float32 at least: name -> (heads, rows, width).
        A mechanism that has some overrides `remember` and hands the state after a call to `Cache.replace`."""
        return {}

    def project(self, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.base.project(self, x_BTD)

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        return self.turn_early(slots, positions_BT)

    def remember(self, new: Seen, cache: Cache | None, update: bool, visible: Callable[[Seen], Visibility]) -> Seen:
        """All tokens seen, this call's (`new`) last; the cache keeps them if `update`.

        Override where what a token leaves behind depends on the tokens before it: `visible(seen)` says on which.
        """
        if cache is None:
            return new
        return (cache.append if update else cache.peek)(self.layer_index, new)

    def queries(self, q_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        return self.turn(q_BHTK, positions_BT, length)

    def read(self, seen: Seen, length: int | None) -> tuple[Tensor, Tensor]:
        return self.base.expand(self, self.turn_late(seen.slots, seen.positions_BS, length))

    def expand(self, k: Any, v: Any) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S, K) and values (B, G, S, V) of what `read` gave: `score` may do without them."""
        return k, v

    #: what is done to the scores of all heads (B, H, T, S), a query block at a time: to the scaled logits before
    #: soft-cap, mask and softmax, and to the weights after it. None leaves the fused path open.
    on_logits: Callable[[Tensor], Tensor] | None = None
    on_weights: Callable[[Tensor], Tensor] | None = None

    def merge(self, out_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """Merge the scored heads; x_BTD is the call's input, for a merge that depends on the query's token."""
        return out_BHTV

    def row_sums(self) -> Tensor | None:
        """What the rows of each pattern sum to, (heads,); None: to 1, and no weight is negative."""
        return None

    #: how far below its sum a row may stay, where a denominator is not exactly the sum
    row_slack: float = 0.0

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        """The per-token map that the patterns (B, H, T, S) of the call's input x_BTD amount to; see `Maps`."""
        c = self.config
        serves = torch.arange(c.num_heads, device=patterns.device)[:, None] // c.group
        serves = serves == torch.arange(c.num_kv_heads, device=patterns.device)
        return torch.einsum("bhts,hg->bhgts", patterns, serves.to(patterns.dtype))

    # The dataflow ------------------------------------------------------------------------------------------------

    def forward(
        self,
        x_BTD: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        update_cache: bool = True,
    ) -> Tensor:
        """Attend: (B, T, D) -> (B, T, D).

        Args:
            mask: a predicate (`Causal`, `Window`, `Documents`, `Padding`, `Dense`, joined by `&`), or a boolean tensor
                (T, S), (B, T, S) or (B, 1, T, S), True = visible, which stands for its `Dense`; it is joined with
                the config's own causality and window and never loosens them. `Exactly(mask)` takes their place: what
                it shows is seen, and nothing else is inferred.
            positions: ints (T,) or (B, T); they only rotate. Where they restart they open a new document, unless
                document ids or an `Exactly` are given. Default: the places after the cached tokens.
            padding: bool, True = real, (B, T) or, over the cached tokens too, (B, S). Padding sees nothing (output
                o_proj(0)) and is not seen.
            documents: ints (T,), (B, T) or (B, S); tokens see their own document only.
            cache: tokens seen before, extended by this call unless `update_cache=False`.
        """
        call = self._prepare(x_BTD, mask, positions, padding, documents, cache, update_cache)
        return self.output(self.merge(self.score(call.q, call.k, call.v, call.visibility), x_BTD))

    def _prepare(
        self,
        x_BTD: Tensor,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        update_cache: bool = True,
    ) -> _Call:
        c = self.config
        check_input(x_BTD, c.hidden_size, getattr(self, "o_proj", None))
        B, T, _ = x_BTD.shape
        check_cache(cache, self.layer_index, B)
        mask = as_mask(mask)
        check_rows(mask, B)
        rules = sort_rules(mask, causal=c.causal, window=c.window)
        padding = given_once("padding", padding, rules.padding)
        documents = given_once("documents", documents, rules.documents)
        check_token_data(x_BTD, positions=positions, padding=padding, documents=documents)
        alone = rules.exact and padding is None and documents is None
        past = 0 if cache is None else cache.length(self.layer_index)
        held = None if cache is None else cache.held(self.layer_index)
        positions, documents = place(
            B, T, x_BTD.device, past=past, held=held, positions=positions, padding=padding, documents=documents,
            exact=rules.exact,
        )  # fmt: skip
        q, slots = self.project(x_BTD)
        S = past + T

        def visible(seen: Seen) -> Visibility:
            if seen.tokens is None:
                told = None if alone else cover(seen.documents_BS, padding, B, S)
                return Visibility.of(rules, T, S, told, x_BTD.device)
            if rules.window is not None or rules.pairs or rules.exact:
                raise HeadloomError(
                    f"{self.name} remembers a state of constant size: a window or a mask over pairs cannot reach the "
                    "tokens in it. Give the whole sequence without a cache"
                )
            return Visibility.of(rules, T, seen.positions_BS.shape[-1], seen.documents_BS, x_BTD.device)

        new = Seen(self.write(slots, positions), positions, documents)
        seen = self.remember(new, cache, update_cache, visible)
        length = None
        if self.rotary is not None and self.rotary.length_dependent:
            length = int(seen.positions_BS.max()) + 1
        return _Call(self.queries(q, positions, length), *self.read(seen, length), visible(seen))

    def score(self, q: Tensor, k: Any, v: Any, visibility: Visibility) -> Tensor:
        """Score what `read` gave; override where it need not all be expanded for that."""
        return self.core(q, *self.expand(k, v), visibility)

    def core(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        """The scores alone: keys and values are ready, tokens meet, and nothing else is done."""
        c = self.config
        return attend(
            q,
            k,
            v,
            visibility,
            scale=self._scale(q),
            pseudo=self.pseudo,
            virtual=self.virtual,
            kind=c.score,
            softcap=c.softcap,
            dropout=c.dropout if self.training else 0.0,
            on_logits=self.on_logits,
            on_weights=self.on_weights,
        )

    def output(self, out_BHTV: Tensor) -> Tensor:
        return self.base.output(self, out_BHTV.transpose(1, 2).flatten(2))

    def _scale(self, q: Tensor) -> float:
        return self.config.scale if self.config.scale is not None else 1 / math.sqrt(q.shape[-1])

    # Rotation ----------------------------------------------------------------------------------------------------

    def tables(self, positions: Tensor, x: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """cos and sin for the rotated features of x at `positions`."""
        assert self.rotary is not None
        return self.rotary.tables(positions, x.dtype, length=length)

    def turn(self, x_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        if self.rotary is None:
            return x_BHTK
        return rotate(x_BHTK, self.tables(positions_BT, x_BHTK, length))

    @property
    def turns_late(self) -> bool:
        """Whether keys are remembered unrotated: reading them then needs the positions of cached tokens."""
        return self.rotary is not None and self.rotary.length_dependent

    def turn_early(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        """Rotate the base's slot before remembering, unless the frequencies change as the sequence grows."""
        if self.rotary is None or self.rotary.length_dependent:
            return slots
        turned = self.base.turned
        return {**slots, turned: self.turn(slots[turned], positions_BT, None)}

    def turn_late(self, slots: dict[str, Tensor], positions_BS: Tensor, length: int | None) -> dict[str, Tensor]:
        """Rotate what `turn_early` had to leave."""
        if length is None:
            return slots
        turned = self.base.turned
        return {**slots, turned: self.turn(slots[turned], positions_BS, length)}

    # Around it ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def maps(self, x_BTD: Tensor, **call: Any) -> Maps:
        """Every attention pattern and the effective per-token map (`Maps`); arguments as `forward`."""
        ready = self._prepare(x_BTD, **{**call, "update_cache": False})
        patterns = self.weights(ready.q, self.expand(ready.k, ready.v)[0], ready.visibility)
        return Maps(patterns, self.effective_map(patterns, x_BTD))

    def forward_with_weights(self, x_BTD: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
        """As `forward`, and the weights (B, heads, T, S) by which every scored head sums its values, as `Maps.patterns`
        before dropout. The output is computed from them, so that gradients pass through.

        Raises: HeadloomError where a head has not one weight for a query and a key (`without_weights` says why).
        """
        if self.without_weights:
            raise HeadloomError(
                f"{self.name} has no attention weights of the form (B, H, T, S): {self.without_weights}"
            )
        ready = self._prepare(x_BTD, **call)
        k, v = self.expand(ready.k, ready.v)
        weights = self.weights(ready.q, k, ready.visibility).to(ready.q.dtype)
        return self.output(self.merge(self.spread(weights, v).to(ready.q.dtype), x_BTD)), weights

    @property
    def without_weights(self) -> str:
        """Why a head has not one weight for every query and key; empty where it has."""
        P = self.pseudo
        return f"its {P} pseudo-heads give a head {P * P} of them for every two tokens" if P > 1 else ""

    def weights(self, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        """The patterns of `Maps`, in float32 at least, of queries and whole keys as `core` takes them."""
        c = self.config
        visible = expand_pseudo(visibility.dense(device=q.device), visibility.past, self.pseudo, self.virtual)
        hooks: dict[str, Any] = {"on_logits": self.on_logits, "on_weights": self.on_weights}
        return blocks.weigh(q, k, visible, self._scale(q), kind=c.score, softcap=c.softcap, **hooks)

    def spread(self, weights: Tensor, v: Tensor) -> Tensor:
        """What `core` makes of the values by these weights."""
        return blocks.spread(weights, v, self.config.dropout if self.training else 0.0)

    def no_decay(self) -> list[str]:
        """Parameters (named from this module) that take no weight decay besides norms and biases: the mixes."""
        return [f"{name}.weight" for name, module in self.named_modules() if isinstance(module, Mix)]

    def fold_into(self, weights: Mapping[str, Linear]) -> Plain:
        """The plain attention that computes the same, from the projections "q", "k", "v", "o". Override with
        `AttentionConfig._folding`, which says when there is one."""
        return Plain(weights["q"], weights["k"], weights["v"], weights["o"], self.config.num_kv_heads)

    def bits_were_packed(self) -> None:
        """`hl.pack_bits` replaced the projections: the config builds such a module again, for its state dict."""
        self.config = self.config.replace(projection="packed")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """PyTorch's defaults for projections and norms, then the mechanism's own initialisation."""
        for module in self.modules():
            if module is not self and isinstance(module, nn.Linear | nn.Conv1d | nn.RMSNorm):
                module.reset_parameters()
        self.reset_heads()

    def extra_repr(self) -> str:
        return ", ".join(f"{k}={v!r}" for k, v in self.config.to_dict().items())

"""The contract: the dataflow of attention, written once.

    project -> remember -> heads -> simulate -> rotate -> score -> merge -> output

A mechanism is one file with a config and a subclass that overrides only the steps in which it differs. The steps:

    project  x (B, T, D) -> q (B, H, T, K) and the base's slots of this call's tokens (k and v, or what they come from)
    write    the base's slots -> the slots a cache remembers
    remember the slots of this call's tokens and the cache -> all slots remembered
    queries  q -> the queries scored
    read     all slots remembered -> a handle of the keys and values scored
    score    -> (B, heads, T, V): `expand` opens the handle, then the `core`, where tokens meet
    merge    the scored heads, and the queries' own x -> (B, H, T, V)
    output   concatenate heads, o_proj -> (B, T, D)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headloom.contract.arguments import check_input
from headloom.contract.bases import BASES, Base
from headloom.contract.call import Ready, sort_call
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Linear, Plain
from headloom.contract.handles import Handle, Whole
from headloom.contract.layer import C_co
from headloom.contract.maps import Maps
from headloom.contract.pictures import Picture, names
from headloom.contract.turning import Turning
from headloom.core.errors import HeadloomError
from headloom.ops import blocks
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Mask, Visibility, expand_rows
from headloom.ops.mixing import Mix
from headloom.ops.rotary import Rotary
from headloom.ops.scores import attend


class Attention(Turning[C_co]):
    """Base of all mechanisms: plain grouped-query attention, out = concat_h(softmax(q_h k_g^T scale) v_g) W_O.

    Generic in its config: `class My(Attention[MyConfig])` has `self.config` of type MyConfig.

    Args:
        config: of the class `config_cls`.
        layer_index: which layer this is, counted from 0; the cache keeps layers apart by it, and constants of some
            mechanisms depend on depth.
        base: one that holds its projections already (a graft's): nothing is initialised then, and `reset_heads` is
            left to the caller.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    #: for `headloom list`: how FLOPs between tokens grow, where "T^2" or "T", which it measures, is not the whole of it
    flops_class: ClassVar[str] = ""
    config_cls: ClassVar[type[AttentionConfig]] = AttentionConfig

    def __init__(self, config: C_co, layer_index: int = 0, *, base: Base[Any] | None = None):
        if not isinstance(config, self.config_cls):
            raise TypeError(f"{type(self).__name__} takes a {self.config_cls.__name__}, not {type(config).__name__}")
        super().__init__(config, layer_index)
        self.base = BASES[config.base] if base is None else base
        self.rotary = None
        if config.rope_theta is not None:
            self.rotary = Rotary(config.rope_theta, config.rotary_dim, config.rope_scaling)
        self.base.build(self)
        self.base.build_output(self)
        before = set(self._modules)
        self.build_heads()
        #: the children that simulate heads, beside the base's
        self.simulating = tuple(name for name in self._modules if name not in before)
        if base is None and not next(chain(self.parameters(), self.buffers())).is_meta:
            self.reset_parameters()

    # What a mechanism may override: its weights -------------------------------------------------------------------

    def build_heads(self) -> None:
        """Create the modules that simulate heads; the base's projections and o_proj are there already."""

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

    def no_decay(self) -> list[str]:
        """Parameters (named from this module) that take no weight decay besides norms and biases: the mixes."""
        return [f"{name}.weight" for name, module in self.named_modules() if isinstance(module, Mix)]

    def fold_into(self, weights: Mapping[str, Linear]) -> Plain:
        """The plain attention that computes the same, from the projections "q", "k", "v", "o", each (weight (out, in),
        bias or None). Override with `AttentionConfig._folding`, which says when there is one."""
        return Plain(weights["q"], weights["k"], weights["v"], weights["o"], self.config.num_kv_heads)

    # What a mechanism may override: its steps ---------------------------------------------------------------------

    #: rows that a token has in the scores, side by side: queries are (B, heads, T P, K), keys (B, heads, S P, K). Each
    #: sees what its token sees; where they are causal among themselves, a row sees of its own token no later row
    rows_per_token: int = 1
    rows_causal: bool = False

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        """The slots of one token in the cache: name -> (heads, width)."""
        return self.base.slots(self.config)

    def constant_slots(self) -> dict[str, tuple[int, int, int]]:
        """Slots whose size is the same for any number of tokens, float32 at least: name -> (heads, rows, width).
        A mechanism that has some overrides `remember` and hands the state after a call to `Cache.replace`."""
        return {}

    def project(self, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """x -> q (B, H, T, K), and the slots (B, heads, T, width) of this call's tokens; nothing is rotated yet."""
        return self.base.project(self, x_BTD)

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        """The slots of `project` -> those that a cache keeps, as `cache_slots` says: here the base's, rotated by their
        tokens' positions (1 or B, T)."""
        return self.turn_early(slots, positions_BT)

    def remember(self, new: Seen, cache: Cache | None, update: bool, visible: Callable[[Seen], Visibility]) -> Seen:
        """All tokens seen, this call's (`new`) last; the cache keeps them if `update`.

        Override where what a token leaves behind depends on the tokens before it: `visible(seen)` says on which.
        """
        if cache is None:
            return new
        return (cache.append if update else cache.peek)(self.layer_index, new)

    def queries(self, q_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        """q (B, H, T, K) -> the queries scored, (B, heads, T P, width), rotated. length: tokens so far, where the
        frequencies of the rotation depend on it, else None."""
        return self.turn(q_BHTK, positions_BT, length)

    def read(self, seen: Seen, length: int | None) -> Handle:
        """What the queries meet, from all slots remembered; length as in `queries`.

        Here whole keys and values. Where `score` may do without these, a handle of the mechanism's own, a small frozen
        dataclass, which its `score` takes and its `expand` opens.
        """
        return Whole(*self.base.expand(self, self.turn_late(seen.slots, seen.positions_BS, length)))

    def score(self, q: Tensor, handle: Handle, visibility: Visibility) -> Tensor:
        """Queries (B, heads, T P, K) and what `read` gave -> (B, heads, T P, V). Override where not all of it need be
        expanded for that."""
        return self.core(q, *self.expand(handle), visibility)

    def expand(self, handle: Handle) -> tuple[Tensor, Tensor]:
        """Keys (B, G, S P, K) and values (B, G, S P, V) of what `read` gave; query head h meets head h // (H / G)."""
        assert isinstance(handle, Whole)
        return handle.k, handle.v

    def core(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        """The scores alone, (B, heads, T P, V): keys and values are ready, tokens meet, and nothing else is done."""
        c = self.config
        return attend(
            q,
            k,
            v,
            visibility,
            scale=self._scale(q),
            rows_per_token=self.rows_per_token,
            rows_causal=self.rows_causal,
            kind=c.score,
            softcap=c.softcap,
            dropout=c.dropout if self.training else 0.0,
            on_logits=self.on_logits,
            on_weights=self.on_weights,
        )

    #: what is done to the scores of all heads (B, H, T, S), a query block at a time: to the scaled logits before
    #: soft-cap, mask and softmax, and to the weights after it. None leaves the fused path open.
    on_logits: Callable[[Tensor], Tensor] | None = None
    on_weights: Callable[[Tensor], Tensor] | None = None

    def merge(self, out_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """The scored heads (B, heads, T P, V) -> (B, H, T, V); x_BTD is the call's input, for a merge that depends on
        the query's token."""
        return out_BHTV

    def output(self, out_BHTV: Tensor) -> Tensor:
        """The merged heads (B, H, T, V) -> (B, T, D)."""
        return self.base.output(self, out_BHTV.transpose(1, 2).flatten(2))

    def _scale(self, q: Tensor) -> float:
        return self.config.scale if self.config.scale is not None else 1 / math.sqrt(q.shape[-1])

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

        Raises:
            HeadloomError: an argument of a wrong type, shape or device, or one said twice.
        """
        call = self._prepare(x_BTD, mask, positions, padding, documents, cache, update_cache)
        return self.output(self.merge(self.score(call.q, call.handle, call.visibility), x_BTD))

    def _prepare(
        self,
        x_BTD: Tensor,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        update_cache: bool = True,
    ) -> Ready:
        """All steps before the scores; arguments as `forward`."""
        c = self.config
        check_input(x_BTD, c.hidden_size, getattr(self, "o_proj", None))
        name = getattr(self, "name", "attention")
        given = sort_call(
            name, self.layer_index, x_BTD, causal=c.causal, window=c.window, mask=mask, positions=positions,
            padding=padding, documents=documents, cache=cache,
        )  # fmt: skip
        q, slots = self.project(x_BTD)
        new = Seen(self.write(slots, given.positions_BT), given.positions_BT, given.documents_BT)
        seen = self.remember(new, cache, update_cache, given.visibility)
        length = None
        if self.rotary is not None and self.rotary.length_dependent:
            length = int(seen.positions_BS.max()) + 1
        return Ready(self.queries(q, given.positions_BT, length), self.read(seen, length), given.visibility(seen))

    # Its maps ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def maps(self, x_BTD: Tensor, **call: Any) -> Maps:
        """Every attention pattern and the effective per-token map (`Maps`); arguments as `forward`."""
        ready = self._prepare(x_BTD, **{**call, "update_cache": False})
        patterns = self.weights(ready.q, self.expand(ready.handle)[0], ready.visibility)
        return Maps(patterns, self.effective_map(patterns, x_BTD))

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
        k, v = self.expand(ready.handle)
        weights = self.weights(ready.q, k, ready.visibility).to(ready.q.dtype)
        return self.output(self.merge(self.spread(weights, v).to(ready.q.dtype), x_BTD)), weights

    @property
    def without_weights(self) -> str:
        """Why a head has not one weight for every query and key; empty where it has."""
        P = self.rows_per_token
        return (
            f"a token has {P} rows in the scores, so a head has {P * P} of them for every two tokens" if P > 1 else ""
        )

    def weights(self, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        """The patterns of `Maps`, in float32 at least, of queries and whole keys as `core` takes them."""
        c = self.config
        dense = visibility.dense(device=q.device)
        visible = expand_rows(dense, visibility.past, self.rows_per_token, self.rows_causal)
        hooks: dict[str, Any] = {"on_logits": self.on_logits, "on_weights": self.on_weights}
        return blocks.weigh(q, k, visible, self._scale(q), kind=c.score, softcap=c.softcap, **hooks)

    def spread(self, weights: Tensor, v: Tensor) -> Tensor:
        """What `core` makes of the values by these weights, (B, heads, T, V)."""
        return blocks.spread(weights, v, self.config.dropout if self.training else 0.0)

    # Around it ---------------------------------------------------------------------------------------------------

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

"""Adapts a mechanism to Transformers' attention call: what a family's layer passes in, and what it expects back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headloom.core.errors import HeadloomError
from headloom.hf.model.config import FAMILY_PROJECTIONS, FAMILY_ROTARY, OWN_PROJECTIONS, PREFIX
from headloom.hf.model.family import Family, families, family_named
from headloom.hf.model.layer_plan import LayerPlan
from headloom.hf.model.layouts import Misfit
from headloom.hf.model.masks import alone, is_all
from headloom.hf.model.room import view_of
from headloom.hf.model.rope import FamilyRotary
from headloom.hf.model.share import weights_at_hand
from headloom.mechanism import mechanisms
from headloom.ops.masks import Window, refuse

PLACES_UNKNOWN = (
    "the 4-D mask shows its queries different cached tokens (branches of a tree), and this layer rotates cached keys "
    "when it reads them: a transformers cache holds no positions to do so. Choose options that remember rotated keys "
    "(cache='expanded', no rotary scaling that changes with length), or crop the cache to one branch"
)


class GraftedAttention:
    """Mixin before a mechanism's class: takes what a transformers layer passes to its attention and calls the mechanism
    with it."""

    own_window: int | None = None
    """A window that the family's config does not know, so that masks made by transformers do not hold it."""

    closing: str | None = None
    """The name of the family's dropout behind the output projection, where that projection is not the family's."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        in_order: bool = False,
        with_weights: bool = False,
        mask_is_all: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of one layer.

        Args:
            hidden_states: x (B, T, D).
            position_embeddings: the family's cos and sin; not used, the mechanism rotates by `position_ids`.
            attention_mask: in any form that transformers makes or passes on (`headloom.hf.model.masks.arriving`).
            cache: a transformers cache, also as `past_key_values` or `layer_past`.
            position_ids: (B or 1, T), also as `places`. in_order: they only count from 0.
            documents: ids (B, T); tokens of different documents do not see each other.
            with_weights: return the attention weights too.
            mask_is_all: whether a 4-D mask is the caller's, to which nothing is added; None: not known.
        Returns:
            (output (B, T, D), weights (B, heads, T, S) or None).
        Raises:
            HeadloomError: a mask that cannot be read, or a cache that holds what this attention did not write.
        """
        for name in ("past_key_values", "layer_past"):
            cache = kwargs.get(name) if cache is None else cache
        position_ids = kwargs.get("places") if position_ids is None else position_ids
        layer, T = self.layer_index, hidden_states.shape[1]  # type: ignore[attr-defined]
        view = None if cache is None else view_of(getattr(cache, "self_attention_cache", cache), layer, T)
        exact = is_all(attention_mask, mask_is_all)
        mask = alone(attention_mask, T, exact) if view is None else view.arriving(attention_mask, layer, T, exact=exact)
        if exact and mask_is_all is None and self.own_window is not None and mask is not None:
            mask = mask & Window(self.own_window)
        if exact and view is not None and self.turns_late:  # type: ignore[attr-defined]
            refuse(view.apart, PLACES_UNKNOWN)
        offloaded = any(p.is_meta for p in self.parameters()) and not hidden_states.is_meta  # type: ignore[attr-defined]
        with weights_at_hand(self) if offloaded else contextlib.nullcontext():  # type: ignore[arg-type]
            attend: Any = super().forward_with_weights if with_weights else super().forward  # type: ignore[misc]
            found = attend(
                hidden_states,
                mask=mask,
                positions=None if in_order else position_ids,
                documents=documents,
                cache=view,
            )
        out, weights = found if with_weights else (found, None)
        if self.closing is not None:
            out = self.get_submodule(self.closing)(out)  # type: ignore[attr-defined]
        hand_over(weights)
        return out, weights

    def turn(self, x_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        if isinstance(self.rotary, FamilyRotary) and self.rotary.single:  # type: ignore[attr-defined]
            x_BHTK = x_BHTK.float().to(x_BHTK.dtype)
        return super().turn(x_BHTK, positions_BT, length)  # type: ignore[misc]


def hand_over(weights: Tensor | None) -> None:
    """Add a layer's weights to the `attentions` that transformers collects in this call: it collects them itself from
    attentions of the family's class only."""
    from transformers.utils.output_capturing import _active_collector

    collected = None if weights is None else _active_collector.get()
    if collected is not None and "attentions" in collected:  # not when a checkpointed layer is computed again
        collected["attentions"].append(weights)


@functools.cache
def attention_class(family_name: str, mechanism: str) -> Any:
    """The mechanism's module, called as the family calls its attention; state-dict names are the mechanism's own.

    It is an attribute of this file, so that pickle and copy find it by its name (`HeadloomLlamaAttention_iha`).
    """
    name = f"{PREFIX}{family_named(family_name).attention_class().__name__}_{mechanism}"
    bases = (GraftedAttention, mechanisms()[mechanism].cls)
    return globals().setdefault(name, type(name, bases, {"__module__": __name__}))


def make_attention(
    family: Family,
    plan: LayerPlan,
    old: nn.Module,
    *,
    rotary: str = FAMILY_ROTARY,
    projections: str = FAMILY_PROJECTIONS,
) -> Any:
    """The module that a plan describes, holding the projections, norms and dropout of `old`, the family's attention.

    Where a mechanism needs other projections it makes them itself, if the family names its own as we do or the model
    was built around it; then its `base` is not the family's layout. `rotary` and `projections`: whose they are, as the
    model's config says.

    Raises: HeadloomError for a mechanism that can do neither.
    """
    cls, layout = attention_class(family.name, plan.mechanism), family.layout
    own = projections == OWN_PROJECTIONS
    try:
        if own and not layout.ours:
            raise Misfit(f"its projections are not {family.name}'s")
        attention = cls(plan.config, plan.index, base=layout.taking(old))
        attention.base = layout
    except Misfit as problem:
        if not layout.ours and not own:
            raise HeadloomError(
                f"layer {plan.index}: {plan.mechanism} cannot stand on {family.name}'s attention: {problem}"
            ) from None
        attention = cls(plan.config, plan.index)
        layout.give_norms(attention, old)
        if layout.dropout is not None:
            attention.add_module(layout.dropout, old.get_submodule(layout.dropout))
            attention.closing = layout.dropout
    if plan.config.window != plan.usual.get("window"):
        attention.own_window = plan.config.window
    if rotary == FAMILY_ROTARY and attention.rotary is not None:
        attention.rotary = family.rotary(attention.rotary.theta, attention.rotary.dim, attention.rotary.scaling)
    return attention


@contextlib.contextmanager
def in_width_of(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors are float64 for a float64 model and float32 otherwise: initial values are rounded to a half
    type only once, at the end."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def __getattr__(name: str) -> type:
    """An attention class that this process has not made yet, for pickle."""
    rest, _, mechanism = name.removeprefix(PREFIX).partition("_")
    if name.startswith(PREFIX) and mechanism in mechanisms():
        for family in families().values():
            if rest == family.attention_class().__name__:
                return attention_class(family.name, mechanism)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What `graft` and `fold` say of the models they return."""

from __future__ import annotations

import dataclasses

from headloom.hf.model.layer_plan import LayerPlan


@dataclasses.dataclass(frozen=True)
class GraftReport:
    """What a graft changed.

    difference: largest absolute difference on a probe batch of what was `compared`: the logits, or the last hidden
    states of a model whose head gives none for each token; relative: over their range; exact: whether it is within
    rounding of the model's type.
    """

    changes: tuple[LayerPlan, ...]
    num_layers: int
    parameters_before: int
    parameters_added: int
    difference: float
    relative: float
    exact: bool
    compared: str = "logits"

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(change.mechanism for change in self.changes))
        share = 100 * self.parameters_added / max(1, self.parameters_before)
        kept = "its function is kept" if self.exact else "its function is NOT kept"
        return (
            f"{kinds} in {len(self.changes)} of {self.num_layers} layers; {self.parameters_added:,} parameters added "
            f"({share:.2f} %); {self.compared} differ by {self.difference:.1e} ({self.relative:.1e} of their range): "
            f"{kept}"
        )


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What a fold did.

    layers: those that were grafted. kv_heads_before, kv_heads: of every layer of the model; more of them widen the
    cache. difference, relative: of what was `compared` (logits, last hidden states) on a probe batch.
    """

    layers: tuple[int, ...]
    kv_heads_before: int
    kv_heads: int
    parameters_before: int
    parameters: int
    compared: str
    difference: float
    relative: float

    def __str__(self) -> str:
        cache = "key/value heads as before"
        if self.kv_heads != self.kv_heads_before:
            ratio = self.kv_heads / self.kv_heads_before
            cache = f"{self.kv_heads} key/value heads instead of {self.kv_heads_before}: the cache is {ratio:g} times"
        return (
            f"{len(self.layers)} layers folded into plain weights; {cache}; {self.parameters:,} parameters, "
            f"{self.parameters_before:,} before; {self.compared} differ by {self.difference:.1e} "
            f"({self.relative:.1e} of their range)"
        )

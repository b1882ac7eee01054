"""What a model computes on a probe batch, to be compared with what another one makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headloom.core.errors import HeadloomError
from headloom.hf.grafting.sharing import without_hooks
from headloom.hf.model.family import Family

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def probe_batch(model: Any) -> dict[str, Tensor]:
    """Two rows of random tokens, the second one left-padded."""
    config, device = model.config, model.get_input_embeddings().weight.device
    T = min(24, getattr(config, "max_position_embeddings", 48) // 2)  # some families count positions from an offset
    ids = torch.randint(config.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, : T // 3] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def compared(family: Family, model: Any) -> str:
    """What is compared: "logits", or "last hidden states" where the model's head gives no logits for each token."""
    heads = family.head_classes()
    wordy = [heads.get(name) for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM")]
    return "logits" if type(model) in wordy else "last hidden states"


Routes = list[Any]
"""What the routers of a mixture of experts gave on a probe batch, in the order of their calls."""


def _route(family: Family, model: Any, routes: Routes) -> None:
    """From now on routers choose the experts that stand in `routes`; what they choose where it is empty is kept there.

    A difference of rounding may send a token to another expert. It then says nothing about the attention.
    """
    again = iter(tuple(routes))

    def take(router: nn.Module, call: Any, chosen: Any) -> Any:
        found = next(again, None)
        if found is None:
            routes.append(chosen)
        return found

    for layer in family.layers(model):
        for router in family.routers(layer):
            router.register_forward_hook(take)


@torch.no_grad()
def outputs_of(family: Family, model: Any, probe: dict[str, Tensor], what: str, routes: Routes) -> Tensor:
    """The outputs of a model in evaluation mode, its tokens sent to the experts of `routes` (empty: filled).

    A copy on the same tensors is called: the model's flags stay, and none of its hooks runs.
    """
    twin = without_hooks(model)
    _route(family, twin, routes)
    if what == "logits":
        return twin(**probe, use_cache=False).logits
    return twin.base_model(**probe, use_cache=False).last_hidden_state


def reference_of(family: Family, model: Any, what: str) -> tuple[dict[str, Tensor], Tensor, Routes]:
    """A probe batch, what the model makes of it, and the experts it chose.

    transformers' eager attention gives NaN for padding in float64: then the row without padding alone is compared.
    """
    probe = probe_batch(model)
    for rows in (2, 1):
        probe = {name: values[:rows] for name, values in probe.items()}
        routes: Routes = []
        reference = outputs_of(family, model, probe, what, routes)
        if bool(reference[probe["attention_mask"].bool()].isfinite().all()):
            return probe, reference, routes
    raise HeadloomError(f"this model's own {what} on a probe batch are not finite: nothing can be compared with them")


def tolerance(family: Family, model: Any) -> float:
    """The largest difference, relative to the range, that counts as rounding.

    Parts of a float64 model may compute in float32: transformers' eager attention its softmax, some families their
    rotation.
    """
    dtype = model.dtype
    if dtype == torch.float64 and (model.config._attn_implementation == "eager" or family.rotary.single):
        dtype = torch.float32
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def largest_difference(reference: Tensor, got: Tensor, real: Tensor) -> tuple[float, float]:
    """(largest difference, that over the reference's range) on real tokens."""
    wanted, got = reference[real].double(), got[real].double()
    difference = float((wanted - got).abs().max())
    spread = float(wanted.max() - wanted.min())
    if not difference < float("inf"):
        return float("inf"), float("inf")
    return difference, difference / spread if spread > 0 else difference

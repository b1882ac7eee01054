"""The plan of a layer's attention: made once, then written into the model's config and built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headloom.contract.config import AttentionConfig
from headloom.hf.model.family import Family
from headloom.mechanism import layer_config, make_config, mechanisms, taken


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer with another attention than its family's own.

    index: the layer's. mechanism: a name. config: the attention's whole config. usual: the fields that describe the
    family's own attention in this layer (`Family.common`).
    """

    index: int
    mechanism: str
    config: AttentionConfig
    usual: Mapping[str, Any] = dataclasses.field(repr=False)

    def spec(self) -> dict[str, Any]:
        """What a model's config says of the layer: all that its family's config does not say, so that later defaults
        change nothing in a saved folder."""
        usual = taken(self.mechanism, self.usual)
        options = {k: v for k, v in self.config.to_dict().items() if k not in usual or usual[k] != v}
        return {"mechanism": self.mechanism, "options": options}


def plan_layer(family: Family, config: Any, index: int, mechanism: str, options: Mapping[str, Any]) -> LayerPlan:
    """The plan of layer `index` from the model's config and what `options` say besides; these win.

    Raises: HeadloomError for an unknown mechanism or option, and for a config that the family cannot serve.
    """
    if mechanism not in mechanisms():
        make_config(mechanism)  # raises with the near names
    usual = family.common(config, index)
    return LayerPlan(index, mechanism, layer_config(mechanism, usual, options), usual)

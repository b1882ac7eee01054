"""A module with a config: what a base builds its projections on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from headloom.contract.common import CommonOptions

C_co = TypeVar("C_co", bound=CommonOptions, covariant=True)


class Layer(nn.Module, Generic[C_co]):
    """An attention as its base sees it: `config`, `layer_index` (counted from 0) and the children that are modules.

    Every learned weight of an attention stands in a child module, so an attribute that is not declared is a module.
    """

    config: C_co
    layer_index: int

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nn.Module: ...

    def __init__(self, config: C_co, layer_index: int = 0):
        super().__init__()
        self.config = config
        self.layer_index = layer_index

    @property
    def merged_width(self) -> int:
        """The width that o_proj reads: all heads' values side by side."""
        return self.config.num_heads * self.config.value_dim

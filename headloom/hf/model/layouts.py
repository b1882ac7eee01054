"""How a family's attention holds q, k, v and o: bases that stand on a model's own modules instead of new ones.

A graft takes the projections, the norms of queries and keys and the output dropout out of the attention it replaces,
under the family's own names, so that a state dict reads as the family's with the mixes beside it. A layout says which
modules these are and where in them each head's rows stand. It is also the way to read and write them in one form,
whatever the family: `weights` and `write`.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headloom.contract.bases import BASES, GroupedBase
from headloom.contract.config import AttentionConfig
from headloom.core.errors import HeadloomError

Weights = dict[str, tuple[Tensor, Tensor | None]]
"""Of "q", "k", "v" and "o" (weight (out, in), bias (out,) or None)."""


class Misfit(HeadloomError):
    """A mechanism's config needs other projections than the model's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(GroupedBase, abc.ABC):
    """The modules of an attention by the family's names for them.

    Args:
        out: the output projection, or None where it stands outside the attention, which then returns its heads.
        dropout: what follows `out`. norm: RMSNorm `q_norm` and `k_norm`, per "head" or over the full "width".
        conv1d: the projections are transformers' Conv1D, whose weights stand (in, out).
        source: the attention to take modules from (`taking`); a layout at work has none.
    """

    out: str | None
    dropout: str | None = None
    norm: Literal["head", "width"] | None = None
    conv1d: bool = False
    source: nn.Module | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def ours(self) -> bool:
        """Whether the names are those of `headloom.mechanism`."""
        return self.projections == ("q_proj", "k_proj", "v_proj", "o_proj")

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """The projections that read x."""

    @abc.abstractmethod
    def parts(self, name: str) -> tuple[str, int]:
        """Which module holds "q", "k" or "v", and as which of its parts."""

    @abc.abstractmethod
    def cut(self, rows: Tensor, heads: int) -> tuple[Tensor, ...]:
        """A module's output rows (rows, ...) as its parts, each of them head-major."""

    @abc.abstractmethod
    def join(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        """The inverse of `cut`."""

    # ---- as a base -------------------------------------------------------------------------------------------------
    def taking(self, source: nn.Module) -> Layout:
        """This layout, building from the modules of `source`."""
        return dataclasses.replace(self, source=source)

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, *([] if self.out is None else [self.out]))

    @property
    def names(self) -> tuple[str, ...]:
        """Every module that a graft takes."""
        norms = () if self.norm is None else ("q_norm", "k_norm")
        return (*self.projections, *norms, *([] if self.dropout is None else [self.dropout]))

    def build(self, attn: Any) -> None:
        assert self.source is not None
        self.check(attn)
        for name in self.names:
            attn.add_module(name, self.source.get_submodule(name))

    def give_norms(self, attn: Any, source: Any) -> None:
        """To an attention with projections of its own the norms of `source`, where it has such ones."""
        if self.norm is None or attn.config.qk_norm != self.norm or type(attn.base) is not GroupedBase:
            return
        for name in ("q_norm", "k_norm"):
            if getattr(attn, name).weight.shape == getattr(source, name).weight.shape:
                setattr(attn, name, getattr(source, name))

    def build_output(self, attn: Any) -> None:
        """Nothing: `build` took it."""

    def output(self, attn: Any, heads_BTW: Tensor) -> Tensor:
        out = heads_BTW if self.out is None else getattr(attn, self.out)(heads_BTW)
        return out if self.dropout is None else getattr(attn, self.dropout)(out)

    def check(self, attn: Any) -> None:
        """Raises Misfit where the config of `attn` describes other projections than the source's."""
        c, source = attn.config, self.source
        if type(BASES[c.base]) is not GroupedBase:
            raise Misfit(f"base '{c.base}' makes queries, keys and values by projections that the model does not have")
        if c.projection != AttentionConfig.projection:
            raise Misfit(f"projection '{c.projection}' needs separate projections named q_proj, k_proj, v_proj, o_proj")
        if c.qk_norm != self.norm:
            raise Misfit(f"qk_norm={c.qk_norm!r}, where the model has {self.norm!r}")
        theirs = self.weights(source, c.num_kv_heads)
        rows = {"q": c.query_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.value_dim}
        sizes = {name: (width, c.hidden_size) for name, width in rows.items()}
        if self.out is None:
            width = rows["v"] * c.group
            if attn.merged_width != width:
                raise Misfit(f"its heads are {attn.merged_width} wide together, and the model reads {width}")
        else:
            sizes["o"] = (c.hidden_size, attn.merged_width)
        for name, size in sizes.items():
            weight, bias = theirs[name]
            if tuple(weight.shape) != size:
                raise Misfit(f"its {name} projection is {size}, the model's {tuple(weight.shape)}")
            if (bias is not None) != (c.out_bias if name == "o" else c.qkv_bias):
                raise Misfit(f"a bias on one side only in {name}; leave qkv_bias and out_bias to the model")

    # ---- reading and writing ---------------------------------------------------------------------------------------
    def weights(self, attn: Any, heads: int | None = None) -> Weights:
        """Each projection in its plain form, rows head-major as in a Linear of its own; "o" only if it is inside.

        attn: a grafted attention, or the family's own with the number of its key/value `heads`.
        """
        heads = attn.config.num_kv_heads if heads is None else heads
        found: Weights = {}
        for name in "qkv" if self.out is None else "qkvo":
            path, part = self._place(name)
            weight, bias = self._plain(getattr(attn, path))
            rows = self._cut(name, weight, heads)[part]
            found[name] = rows, None if bias is None else self._cut(name, bias, heads)[part]
        return found

    @torch.no_grad()
    def write(self, attn: Any, name: str, weight: Tensor, bias: Tensor | None = None, heads: int | None = None) -> None:
        """Put a plain weight (and bias) of "q", "k", "v" or "o" where the family keeps it; `attn` as in `weights`.

        A bias None is written as zeros where the family has one. A Linear of its own takes another number of rows or
        columns. Raises HeadloomError for a bias or a size that the family has no place for.
        """
        heads = attn.config.num_kv_heads if heads is None else heads
        path, part = self._place(name)
        module: Any = getattr(attn, path)
        if bias is not None and module.bias is None:
            raise HeadloomError(f"{path} has no bias to hold the one of {name}")
        pieces = self._cut(name, self._plain(module)[0], heads)
        if weight.shape != pieces[part].shape:
            if len(pieces) > 1 or self.conv1d:
                came, holds = tuple(weight.shape), tuple(pieces[part].shape)
                raise HeadloomError(f"{name} {came} does not fit into {path}, which holds {holds}")
            module = _of_size(module, *weight.shape)
            setattr(attn, path, module)
        if bias is None:
            bias = weight.new_zeros(weight.shape[0])
        for whole, rows in zip(self._plain(module), (weight, bias), strict=True):
            if whole is not None:
                parts = list(self._cut(name, whole, heads))
                parts[part] = rows.to(whole)
                whole.copy_(parts[0] if name == "o" else self.join(tuple(parts), heads))

    def _place(self, name: str) -> tuple[str, int]:
        if name != "o":
            return self.parts(name)
        if self.out is None:
            raise HeadloomError("the output projection stands outside this family's attention")
        return self.out, 0

    def _cut(self, name: str, rows: Tensor, heads: int) -> tuple[Tensor, ...]:
        return (rows,) if name == "o" else self.cut(rows, heads)

    def _plain(self, module: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = module.weight.detach(), module.bias
        return weight.T if self.conv1d else weight, None if bias is None else bias.detach()

    def plain_kind(self) -> type[nn.Module]:
        """The class that a projection must be of exactly, to be taken."""
        if not self.conv1d:
            return nn.Linear
        from transformers.pytorch_utils import Conv1D

        return Conv1D


def _of_size(linear: Any, rows: int, columns: int) -> nn.Linear:
    """A Linear of another size, in the type, on the device and with the switches of `linear`."""
    weight = linear.weight
    made = nn.Linear(columns, rows, bias=linear.bias is not None, device=weight.device, dtype=weight.dtype)
    return made.requires_grad_(weight.requires_grad).train(linear.training)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separate(Layout):
    """Three projections. By the names q_proj, k_proj, v_proj, o_proj they are replaced by a mechanism's own where it
    needs others."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    out: str | None = "o_proj"

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.q, self.k, self.v

    def parts(self, name: str) -> tuple[str, int]:
        return {"q": self.q, "k": self.k, "v": self.v}[name], 0

    def cut(self, rows: Tensor, heads: int) -> tuple[Tensor, ...]:
        return (rows,)

    def join(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        return parts[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused(Layout):
    """One projection for q, k and v of as many heads each: all of q, then k, then v, or `interleaved`, q, k and v of
    the first head, then of the next."""

    qkv: str
    interleaved: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.qkv,)

    def parts(self, name: str) -> tuple[str, int]:
        return self.qkv, "qkv".index(name)

    def cut(self, rows: Tensor, heads: int) -> tuple[Tensor, ...]:
        if not self.interleaved:
            return rows.chunk(3)
        return tuple(part.flatten(0, 1) for part in rows.unflatten(0, (heads, 3, -1)).unbind(1))

    def join(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        if not self.interleaved:
            return torch.cat(parts)
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)

    def split(self, attn: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = attn.config
        qkv = getattr(attn, self.qkv)(x_BTD)
        if self.interleaved:
            q, k, v = qkv.unflatten(-1, (-1, 3, c.head_dim)).unbind(-2)
        else:
            q, k, v = qkv.unflatten(-1, (3, -1, c.head_dim)).unbind(-3)
        return q, k, v

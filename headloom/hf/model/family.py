"""What Headloom must know of a model family: where its attention is and how its config reads.

One small file a family in `headloom/hf/families/`, or in a file of yours (`register_family`).
"""

from __future__ import annotations

import abc
import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from headloom.core.errors import HeadloomError
from headloom.core.registry import Registry
from headloom.hf.model.layouts import Layout, Separate
from headloom.hf.model.rope import FamilyRotary, from_parameters


class Family(abc.ABC):
    """Where a transformers family keeps its attention and what its config says about it.

    A family file defines one subclass and `FAMILY = ThatClass()`. It imports transformers' modelling code inside the
    methods only, so that listing the families costs nothing.
    """

    name = ""
    """transformers' `model_type`."""

    attention = ""
    """The class of a layer's attention, in the family's modelling file."""

    layers_path = "layers"
    """Where the bare model keeps its layers."""

    attention_path = "self_attn"
    """Where a layer keeps its attention."""

    layout: ClassVar[Layout] = Separate()
    """How that attention holds q, k, v and o."""

    rotary: ClassVar[type[FamilyRotary]] = FamilyRotary
    """How its cosines and sines are rounded."""

    passes_positions = True
    """Whether the layers are told `position_ids`."""

    size_names: ClassVar[dict[str, str]] = {}
    """Sizes that its config has under another name than Llama's, beside those that its class translates itself."""

    free_head_dim = False
    """Whether a head may be of any width; else the heads fill the model's."""

    head_dim_names: ClassVar[tuple[str, ...]] = ()
    """Fields of its config that follow the width of a head where they are equal to it."""

    refused: ClassVar[dict[str, str]] = {}
    """model_type of relatives that cannot be grafted -> why, and what can."""

    @abc.abstractmethod
    def common(self, config: Any, index: int) -> dict[str, Any]:
        """The fields of `AttentionConfig` that describe the family's own attention in layer `index`.

        Raises: HeadloomError for a config that asks for something that Headloom's attention does not compute.
        """

    def causal(self, config: Any) -> bool:
        """Whether a model of this config predicts the next token: no token sees a later one."""
        return True

    def config_class(self) -> Any:
        """The family's config class in transformers."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[self.name]

    def attention_class(self) -> type:
        """The class a layer's attention must have to be replaced (somebody else's replacement is refused)."""
        modelling = importlib.import_module(self.config_class().__module__.replace(".configuration_", ".modeling_"))
        return getattr(modelling, self.attention)

    def as_own(self, attention: nn.Module) -> nn.Module:
        """The modules that a grafted attention took from the family, as a module of the family's class: transformers
        chooses how it draws initial weights by that class. Of an attention with projections of its own, the output
        projection alone."""
        cls: Any = self.attention_class()
        own, layout = cls.__new__(cls), self.layout
        nn.Module.__init__(own)
        if getattr(attention, "base", None) is layout:
            for name in layout.names:
                own.add_module(name, attention.get_submodule(name))
        elif layout.out is not None:
            own.add_module(layout.out, attention.get_submodule("o_proj"))
        return own

    @functools.cache  # noqa: B019  there is one instance of a family, for the whole process
    def head_classes(self) -> dict[str, type]:
        """Auto class name -> the class with that head in the family's modelling file, as transformers' Auto classes
        know them."""
        from transformers.models.auto import modeling_auto

        modelling, found = self.attention_class().__module__, {}
        for name, auto in vars(modeling_auto).items():
            head = auto._model_mapping.get(self.config_class(), None) if name.startswith("AutoModel") else None
            if isinstance(head, type) and head.__module__ == modelling:
                found[name] = head
        return found

    def layers(self, model: Any) -> nn.ModuleList:
        """The layers of a model with or without a head."""
        return model.base_model.get_submodule(self.layers_path)

    def routers(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        """The modules of a layer that choose experts for each token; none but in a mixture of experts."""
        return ()

    def attention_of(self, layer: nn.Module) -> nn.Module:
        """The attention of a layer."""
        return layer.get_submodule(self.attention_path)

    def replace(self, layer: nn.Module, attention: nn.Module) -> None:
        """Put `attention` where the layer has its own."""
        layer.set_submodule(self.attention_path, attention, strict=True)

    def output_of(self, layer: nn.Module) -> Any:
        """The projection that reads the concatenated heads, inside the attention or beside it."""
        return getattr(self.attention_of(layer), str(self.layout.out))

    def feed_forward_width(self, config: Any) -> int:
        """F, the width between the feed-forward's projections."""
        return config.intermediate_size

    def own_config(
        self, sizes: dict[str, Any], windows: Sequence[int | None], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Fields of the family's config for a model of ours, from `sizes` as Llama's config names them.

        windows: every layer's; where the config can say it, transformers' cache drops what no layer can see any more.
        experts: "experts" and "experts_per_token" if given, for families that route tokens.

        Raises: HeadloomError for a family that `build_model` does not build.
        """
        raise HeadloomError(f"models of family '{self.name}' are grafted, not built here: load one and use hl.graft")


class Decoder(Family):
    """What Llama and the families after it share: their config's names, rotary over whole heads, causality."""

    free_head_dim = True

    def common(self, config: Any, index: int) -> dict[str, Any]:
        rope_theta, rope_scaling = from_parameters(self.rope(config, index), config.max_position_embeddings)
        bias = bool(getattr(config, "attention_bias", False))
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            "causal": self.causal(config),
            "window": self.window(config, index),
            "dropout": float(config.attention_dropout or 0.0),
            "qkv_bias": bias,
            "out_bias": bias,
            "qk_norm": self.layout.norm,
            "norm_eps": config.rms_norm_eps,
            "rope_theta": rope_theta,
            "rope_scaling": rope_scaling,
        }

    def window(self, config: Any, index: int) -> int | None:
        """The window of layer `index`, or None: here the config's, in layers that its `layer_types` call sliding."""
        return config.sliding_window if config.layer_types[index] == "sliding_attention" else None

    def rope(self, config: Any, index: int) -> dict[str, Any]:
        """transformers' rotary parameters of layer `index`."""
        return config.rope_parameters


class Encoder(Family):
    """What the encoders share: as many key/value heads as heads, which fill the width, and no causality."""

    def causal(self, config: Any) -> bool:
        return bool(getattr(config, "is_decoder", False))  # BERT and RoBERTa can be made into decoders

    def common(self, config: Any, index: int) -> dict[str, Any]:
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
            "causal": self.causal(config),
        }


_FAMILIES: Registry[Family] = Registry("model family")


def register_family(family: Family) -> Family:
    """Make a family of your own known to grafts, saving and loading, like those of `headloom/hf/families/`.

    Call it in every process before the first graft of the family, and before a saved one is loaded.

    Raises: TypeError for what is no `Family`, or a second family of one name.
    """
    if not isinstance(family, Family):
        raise TypeError(f"register_family takes an instance of a subclass of Family, not {family!r}")
    families()  # those of the folder first: a name of theirs is taken
    return _FAMILIES.add(family.name, family)


def families() -> Mapping[str, Family]:
    """model_type -> family: every file in `headloom/hf/families/`, and what `register_family` was given."""
    _walk()
    return _FAMILIES


@functools.cache
def _walk() -> None:
    package = importlib.import_module("headloom.hf.families")
    for module in pkgutil.iter_modules(package.__path__):
        family = importlib.import_module(f"{package.__name__}.{module.name}").FAMILY
        _FAMILIES.add(family.name, family)


def family_named(name: Any) -> Family:
    """The family of a `model_type`. Raises HeadloomError for an unknown one, which says how to add it."""
    known = families()
    if name in known:
        return known[name]
    for family in known.values():
        if name in family.refused:
            raise HeadloomError(f"a model of type '{name}' cannot be grafted: {family.refused[name]}")
    raise HeadloomError(
        f"model family '{name}' is not known here: nothing says where its attention is and how its config reads. "
        f"Known: {', '.join(sorted(known))}. A family is one file in headloom/hf/families/ with a `Family`, which "
        "gives its name, the class and the path of its attention, its layout and `common`; one in a file of yours is "
        "made known by headloom.hf.register_family"
    )


def attentions(family: Family, model: Any) -> list[nn.Module]:
    """The attention module of every layer, in order."""
    return [family.attention_of(layer) for layer in family.layers(model)]

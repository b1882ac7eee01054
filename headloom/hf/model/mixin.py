"""`Graft`: the mixin of models whose attention is Headloom's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headloom.core.errors import HeadloomError
from headloom.hf.model import documents as docs
from headloom.hf.model import share, stated
from headloom.hf.model.attention import GraftedAttention, in_width_of, make_attention
from headloom.hf.model.cache import DECODE_PACKED, PACKED
from headloom.hf.model.config import MODEL_TYPE, specs_in
from headloom.hf.model.family import Family, attentions
from headloom.hf.model.layer_plan import plan_layer
from headloom.hf.model.masks import IMPLEMENTATION, dense_mask, register_masks
from headloom.hf.model.reports import GraftReport

GROUPED_ALIGNMENT = 8  # 16 bytes of a half type


class Graft:
    """Mixin before a family's model class: builds, initialises, calls, saves and loads a model with grafted layers.

    `config.headloom["layers"]` says per layer which mechanism it has, or None for the family's own attention. State
    dict names stay the family's (`model.layers.0.self_attn.q_proj.weight`), new ones beside them.
    """

    family: Family
    inner_class: type | None
    """The class of the model inside a head; None for that model's own class."""
    forward_names: tuple[str, ...]
    config: Any
    graft_report: GraftReport | None = None
    """What `hl.graft` changed and measured; None for a model that was built or loaded."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        from transformers.initialization import no_init_weights

        register_masks()
        specs = specs_in(config, self.family)
        whose = {name: config.headloom[name] for name in ("rotary", "projections") if name in config.headloom}
        if config._attn_implementation is None:
            config._attn_implementation = IMPLEMENTATION
        with no_init_weights():  # initialised once, below
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
            for index, (layer, spec) in enumerate(zip(self.family.layers(self), specs, strict=True)):
                if spec is not None:
                    plan = plan_layer(self.family, config, index, spec["mechanism"], spec.get("options") or {})
                    old = self.family.attention_of(layer)
                    self.family.replace(layer, make_attention(self.family, plan, old, **whose))
        base: Any = self.base_model  # type: ignore[attr-defined]
        if base is not self:  # the head's own `__init__` has made it: it becomes a graft that can be called and saved
            base.__class__ = self.inner_class
            base.record_outputs()
        self.keep_mixes_wide()
        self.post_init()  # type: ignore[attr-defined]

    def record_outputs(self) -> None:
        """Tell transformers which outputs can be recorded of a model of this class: it asks for that in a model's
        `__init__`, which a model made otherwise has not run."""
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

        _CAN_RECORD_REGISTRY[self] = self._can_record_outputs  # type: ignore[attr-defined, index]

    def grafted(self) -> list[Any]:
        """The grafted attentions, in the order of their layers."""
        return [a for a in attentions(self.family, self) if isinstance(a, GraftedAttention)]

    def keep_mixes_wide(self) -> None:
        """Tell transformers' loader to keep mixes in float32 whatever the model's type."""
        names = {name.rpartition(".")[0] for attention in self.grafted() for name in attention.no_decay()}
        names |= set(getattr(self, "_keep_in_fp32_modules_strict", None) or ())
        self._keep_in_fp32_modules_strict = {name for name in names if name}

    # ---- initialisation -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights that were not loaded: projections as the family does, the rest as the mechanism does.

        The loader marks loaded tensors; the family's `_init_weights` would draw a mechanism's own layers from its
        normal distribution, so these are reset after it. Loaded tensors are never touched.
        """
        fresh = [a for a in self.grafted() if not all(_loaded(p) for p in a.parameters())]
        super().initialize_weights()  # type: ignore[misc]
        for attention in fresh:
            if attention.base is self.family.layout or not self.family.layout.ours:
                self._init_weights(self.family.as_own(attention))  # type: ignore[attr-defined]
            kept = [(p, p.clone()) for p in attention.parameters() if _loaded(p)]
            with in_width_of(next(attention.parameters()).dtype):
                attention.reset_heads()
            for parameter, value in kept:
                parameter.copy_(value)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, though the class is not transformers' own: of custom code it does not initialise modules without
        tensors of their own (a GPT-2 block's MLP), for which the family has rules. Here the tensors have the family's
        names."""
        return False

    # ---- files ----------------------------------------------------------------------------------------------------
    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, and a README.md if the folder has none."""
        self.add_model_tags(MODEL_TYPE)  # type: ignore[attr-defined]
        out = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            share.write_card(self, save_directory)
        return out

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        self.add_model_tags(MODEL_TYPE)  # type: ignore[attr-defined]
        return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        share.check_files(checkpoint_files)
        head: Any = super()
        return head._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    @staticmethod
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        head: Any = super()
        out = head._finalize_model_loading(model, load_config, loading_info)
        share.check_complete(model, out.missing_keys, out.unexpected_keys, load_config.pretrained_model_name_or_path)
        return out

    def bits_were_packed(self) -> None:
        """`hl.pack_bits` replaced projections: the config, and so a saved folder, says which layers are packed."""
        modules: list[Any] = attentions(self.family, self)
        for attention, spec in zip(modules, self.config.headloom["layers"], strict=True):
            if spec is not None:
                spec["options"] = {**(spec.get("options") or {}), "projection": attention.config.projection}

    # ---- the call -------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, documents: Tensor | None = None, **kwargs: Any) -> Any:
        """The family's forward. `documents`: ints (B, T), tokens of different documents do not see each other; they
        also come from `cu_seq_lens_q` and, where `position_ids` restart, from these. A 4-D `attention_mask` (batch, 1,
        queries, keys), or one for each kind of layer, is used as it is: no causality, window or documents are added.

        `output_attentions`: for every layer the weights (B, heads, T, S) of the heads as they are scored.

        Raises: HeadloomError for `output_attentions` where a head has not one weight for two tokens, for decoding after
            a packed prefill, and for `documents` beside a 4-D mask.
        """
        kwargs.update(zip(self.forward_names, args, strict=False))
        if kwargs.pop("prepared", False):  # by the head around this model
            return super().forward(**kwargs, **({} if documents is None else {"documents": documents}))  # type: ignore[misc]
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(self.config, "output_attentions", False)):
            self._check_weights()
            kwargs["with_weights"] = True
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        past = 0 if cache is None else docs.tokens_in(cache)
        alone = self._take_mask(kwargs, documents)
        if past != 0 and getattr(cache, PACKED, False) and not alone:
            raise HeadloomError(DECODE_PACKED)
        found, packed = (None, False) if alone else docs.find(kwargs, documents, past)
        if past != 0 and packed:
            raise HeadloomError(DECODE_PACKED)
        if cache is not None and past == 0:
            setattr(cache, PACKED, False)  # it may have held something else before
        if packed:
            self._check_whole()
        if found is not None:
            kwargs["documents"] = found
        if not self.family.passes_positions and kwargs.get("position_ids") is not None:
            kwargs["places"] = kwargs["position_ids"]  # under a name that goes down to the layers
        if kwargs.get("position_ids") is None and cache is None:
            kwargs["in_order"] = True  # the layers then need not look for restarts, nor a compiler allow for them
        if self.base_model is not self:  # type: ignore[attr-defined]
            kwargs["prepared"] = True
        out = super().forward(**kwargs)  # type: ignore[misc]
        if packed:
            docs.mark(cache, out)
        return out

    def _check_weights(self) -> None:
        for index, attention in enumerate(attentions(self.family, self)):
            reason = getattr(attention, "without_weights", "")
            if reason:
                raise HeadloomError(
                    f"output_attentions=True cannot be served: layer {index}'s {attention.name} has no attention "
                    f"weights (B, H, T, S), as {reason}. hl.maps(attention, hidden_states) gives all patterns of one "
                    "layer's attention, and its effective per-token map"
                )
        own = self.config._attn_implementation
        if None in self.config.headloom["layers"] and own not in (IMPLEMENTATION, "eager"):
            raise HeadloomError(
                f"output_attentions=True: under attn_implementation='{own}' the layers that were not grafted give no "
                f"weights: call model.set_attn_implementation('{IMPLEMENTATION}')"
            )

    def _take_mask(self, kwargs: dict[str, Any], documents: Tensor | None) -> bool:
        """Whether the caller gave a 4-D mask, said to the layers as `mask_is_all`."""
        mask, made = kwargs.get("attention_mask"), kwargs.pop(stated.MADE, False)
        kwargs["mask_is_all"] = alone = stated.is_4d(mask) and not made
        if alone:
            if documents is not None:
                raise HeadloomError(
                    "documents came beside a 4-D attention mask, which says for each pair of tokens who is seen: "
                    "leave documents out, or give a 2-D mask"
                )
            tokens = kwargs.get("input_ids")
            tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
            if tokens is not None:
                B, T = tokens.shape[:2]
                dtype: torch.dtype = self.dtype  # type: ignore[attr-defined]
                kwargs["attention_mask"] = stated.read_mask(mask, B, T, self.config._attn_implementation, dtype)
        return alone

    def _check_whole(self) -> None:
        if self.config._attn_implementation != IMPLEMENTATION and None in self.config.headloom["layers"]:
            raise HeadloomError(
                "packed documents do not reach the layers that were not grafted under "
                f"attn_implementation='{self.config._attn_implementation}': "
                f"call model.set_attn_implementation('{IMPLEMENTATION}')"
            )

    # ---- generation -----------------------------------------------------------------------------------------------
    @staticmethod
    def create_masks_for_generate(config: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        """A dense mask for static caches, whose models accept no object (transformers 5.24 asks it for `.ndim`)."""
        return dense_mask(config, inputs_embeds, **kwargs)

    def _get_static_cache_init_shape(self) -> Any:
        """(heads, width) by which a static cache is allocated before the first call; None: by that call, because a
        mechanism remembers something other than the config's keys and values."""
        shape = super()._get_static_cache_init_shape()  # type: ignore[misc]
        remembered = (list(attention.cache_slots().values()) for attention in self.grafted())
        return shape if all(sizes == [shape, shape] for sizes in remembered) else None

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: all of transformers' continuous batching begins here."""
        raise HeadloomError(
            "continuous batching (generate_batch, cache_implementation='paged') is not served by grafts: its pages "
            "hold the keys and values of the family's own attention, for attention functions of its own. Call "
            "generate(input_ids, attention_mask=...) on a batch of left-padded prompts"
        )

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """The family's answer: transformers looks for a decorator in the source file of a class, and ours has none."""
        head: Any = cls.__mro__[cls.__mro__.index(Graft) + 1]
        return head._can_set_experts_implementation()

    def _grouped_mm_can_dispatch(self) -> bool:
        """Whether experts can be multiplied in one grouped product, whose rows must be aligned; else one by one."""
        possible = super()._grouped_mm_can_dispatch()  # type: ignore[misc]  # raises where there are no experts
        widths = (self.config.hidden_size, self.config.intermediate_size)
        if any(width % GROUPED_ALIGNMENT for width in widths):
            raise ValueError(f"grouped experts need widths that are multiples of {GROUPED_ALIGNMENT}, not {widths}")
        return possible


def _loaded(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)

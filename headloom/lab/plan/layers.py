"""From a variant and a shape to what stands in every layer, a run's configuration, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.lab.spec.resolved import FIELDS, BudgetSpec, Shape, StudySpec, Variant

if TYPE_CHECKING:
    from headloom.mechanism import AttentionConfig
    from headloom.train.config import RunConfig


def resolved_attention(spec: StudySpec, variant: Variant, shape: Shape | None = None) -> dict[str, Any]:
    """The resolved attention; a HeadloomError names the variant whose options do not fit.

    {"attention": the config of every layer} for a mechanism. For a schedule, and in a backbone with several kinds of
    layers, "attention" is what all layers share, and "layers" what else each kind is: {"0-3,5-8": {"mechanism": ...,
    option: value}}.
    """
    from headloom.core.config import fields_of
    from headloom.mechanism import AttentionConfig, mechanisms
    from headloom.mechanism.schedules import option_classes, places

    shape = shape or spec.shapes[variant.label]
    try:
        made = layer_configs(spec, variant, shape)
        classes = option_classes(variant.mechanism)
        every = [config.to_dict() for _, config in made]
        if variant.mechanism in mechanisms():
            alike = {key: value for key, value in every[0].items() if all(one[key] == value for one in every)}
            if len(alike) == len(every[0]):
                return {"attention": alike}
        else:
            of_schedule, common = fields_of(classes[0]), fields_of(AttentionConfig)
            first, *others = (options for _, options in variant.layers(shape))
            given = {k: v for k, v in first.items() if k in common and k not in of_schedule}
            given = {k: v for k, v in given.items() if all(k in one and one[k] == v for one in others)}
            facts = shared(spec, shape)
            alike = AttentionConfig(**{**facts[0], **given}).to_dict()
            for name in [n for n in facts[0] if n not in given and any(one[n] != facts[0][n] for one in facts)]:
                del alike[name]
    except HeadloomError as error:
        raise HeadloomError(f"{variant.label}: {error}") from None
    kinds: dict[str, list[int]] = {}
    layers = [
        {"mechanism": name, **{k: v for k, v in config.items() if k not in alike or alike[k] != v}}
        for (name, _), config in zip(made, every, strict=True)
    ]
    for index, layer in enumerate(layers):
        kinds.setdefault(repr(layer), []).append(index)
    return {"attention": alike, "layers": {places(indices): layers[indices[0]] for indices in kinds.values()}}


def layer_configs(spec: StudySpec, variant: Variant, shape: Shape) -> list[tuple[str, AttentionConfig]]:
    """(mechanism, its config) of every layer."""
    from headloom.mechanism import built_config

    layers = zip(variant.layers(shape), shared(spec, shape), strict=True)
    return [(name, built_config(name, facts, options)) for (name, options), facts in layers]


def shared(spec: StudySpec, shape: Shape) -> list[dict[str, Any]]:
    """What the model says about the attention of every layer."""
    sizes = {"hidden_size": shape.hidden_size, "num_heads": shape.num_heads, "head_dim": shape.head_dim}
    if spec.backbone is None:
        return [{**sizes, "rope_theta": spec.rope_theta}] * shape.num_layers
    from headloom.hf.grafting.backbone import attention_facts

    sizes |= {"num_layers": shape.num_layers, "intermediate_size": shape.intermediate_size}
    return attention_facts(spec.backbone, tokens=shape.tokens, **sizes)


def allowed_differences(spec: StudySpec) -> set[str]:
    """Keys in which runs may differ: the mechanism or schedule, its own options, the knobs, the declared axes, the
    learning rate where there is a grid of them, the seed."""
    from headloom.core.config import fields_of
    from headloom.mechanism import AttentionConfig
    from headloom.mechanism.schedules import option_classes

    common = set(fields_of(AttentionConfig)) - {"base", "num_kv_heads"}
    classes = [cls for variant in spec.variants for cls in option_classes(variant.mechanism)]
    own = {name for config_cls in classes for name in fields_of(config_cls)}
    knobs = {knob for v in spec.variants for budget in spec.budgets for knob in budget.knobs_of(v)}
    moved = {field for name in (*knobs, *spec.axes) for field in FIELDS[name]}
    rate = {"learning_rate"} if spec.has_grid else set()
    follow = moved & {"num_heads", "head_dim", "hidden_size"}
    follow |= {"value_dim", "rotary_dim", "scale"} if "head_dim" in moved else set()
    attention = {f"attention.{name}" for name in (own - common) | follow}
    return {"mechanism", "layers.", "seed"} | moved | rate | attention


def meaningless(spec: StudySpec) -> dict[str, set[str]]:
    """By label, the keys of the attention that make no difference: its mechanism has no use for them, or they follow
    from its base."""
    from headloom.mechanism import mechanisms

    found = {}
    for v in spec.variants:
        if v.mechanism in mechanisms():
            (_, config), *_ = layer_configs(spec, v, spec.shapes[v.label])
            facts = shared(spec, spec.shapes[v.label])[0]
            unused = facts.keys() - config.adopted(facts, v.options).keys()
            found[v.label] = {f"attention.{name}" for name in {*config.without, *config.base_fields, *unused}}
    return found


def run_config(
    spec: StudySpec, variant: Variant, shape: Shape, seed: int, learning_rate: float | None = None
) -> RunConfig:
    """One run's configuration."""
    from headloom.train.config import RunConfig

    specs = variant.layers(shape)
    if spec.backbone is None:
        # `rope_theta` is the model's: layers read it from there, so that all of them turn alike.
        specs = [(name, {key: value for key, value in given.items() if key != "rope_theta"}) for name, given in specs]
        theta = variant.options.get("rope_theta", spec.rope_theta)
        model = {"tie_embeddings": spec.tie_embeddings, "rope_theta": theta}
    else:
        model = {"backbone": spec.backbone}
    return RunConfig(
        name=f"{variant.label}-seed{seed}",
        specs=specs[:1] if all(layer == specs[0] for layer in specs) else specs,
        device=spec.device,
        learning_rate=spec.learning_rates[0] if learning_rate is None else learning_rate,
        warmup_steps=shape.warmup_steps,
        seed=seed,
        threads=spec.threads,
        dtype=spec.dtype,
        compile=spec.compile,
        evaluations=spec.evaluations,
        checkpoint_activations=spec.checkpoint_activations,
        **model,
        **shape.model_dump(),
    )


def meta_model(spec: StudySpec, variant: Variant, shape: Shape, vocab_size: int) -> Any:
    """The variant's model on the meta device: nothing but sizes."""
    from headloom.train.run import build

    return build(run_config(spec, variant, shape, 0).model_copy(update={"vocab_size": vocab_size}), device="meta")


def count_parameters(spec: StudySpec, variant: Variant, shape: Shape, vocab_size: int) -> int:
    """Trainable numbers of the whole model, tied ones once."""
    return sum(parameter.numel() for parameter in meta_model(spec, variant, shape, vocab_size).parameters())


def training_flops(
    spec: StudySpec, variant: Variant, shape: Shape, vocab_size: int, convention: str = "exact"
) -> float:
    """Of forward and backward of the whole model, per predicted token: three times the forward pass's."""
    from headloom.costs.count import model_flops

    model = meta_model(spec, variant, shape, vocab_size)
    return 3.0 * model_flops(model, shape.tokens, convention) / (shape.tokens - 1)


def attention_costs(spec: StudySpec, variant: Variant, shape: Shape) -> dict[str, float]:
    """Of all layers' attention: forward FLOPs per token (visible pairs), and the cache's bytes."""
    from headloom.costs.count import config_cost

    configs = [config for _, config in layer_configs(spec, variant, shape)]
    known = {
        repr(config): config_cost(config, tokens=shape.tokens) for config in {repr(c): c for c in configs}.values()
    }
    layers = [known[repr(config)] for config in configs]
    return {
        "attention_flops_per_token": sum(layer.flops_exact for layer in layers) / shape.tokens,
        "cache_bytes_per_token": sum(layer.cache_bytes_per_token for layer in layers),
        "cache_constant_bytes": sum(layer.cache_constant_bytes for layer in layers),
        "cache_bytes": sum(layer.cache_bytes for layer in layers),
    }


class Counts:
    """What variants count at a shape, each thing counted once: steps and batch make no other model."""

    def __init__(self, spec: StudySpec, vocab_size: int) -> None:
        self._spec, self._vocab_size = spec, vocab_size
        self._known: dict[tuple[Any, ...], Any] = {}

    def _once(self, what: str, variant: Variant, shape: Shape, count: Callable[..., Any], *rest: Any) -> Any:
        key = (what, variant.label, *shape.model_copy(update={"steps": 1, "batch_size": 1}).model_dump().values())
        if key not in self._known:
            self._known[key] = count(self._spec, variant, shape, *rest)
        return self._known[key]

    def parameters(self, variant: Variant, shape: Shape) -> int:
        """Trainable numbers of the whole model."""
        return int(self._once("parameters", variant, shape, count_parameters, self._vocab_size))

    def attention(self, variant: Variant, shape: Shape) -> dict[str, float]:
        """As `attention_costs`."""
        return dict(self._once("attention", variant, shape, attention_costs))

    def flops(self, variant: Variant, shape: Shape, convention: str) -> float:
        """Of training, per predicted token."""
        return float(self._once(convention, variant, shape, training_flops, self._vocab_size, convention))

    def budget(self, budget: BudgetSpec, variant: Variant, shape: Shape) -> float:
        """What a budget says of a variant of this shape."""
        if budget.match == "parameters":
            return self.parameters(variant, shape)
        if budget.match == "tokens":
            return shape.tokens_trained
        if budget.match == "cache":
            return self.attention(variant, shape)["cache_bytes"]
        assert budget.match == "flops"
        return self.flops(variant, shape, budget.convention) * shape.tokens_trained

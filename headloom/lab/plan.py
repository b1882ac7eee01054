"""From a specification to runs: data, equal budgets, run configurations, costs. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.lab.budget import TOLERANCE, match_parameters
from headloom.lab.fairness import refuse_other_differences
from headloom.lab.results import run_folder
from headloom.lab.spec import CompareSpec, VariantSpec
from headloom.lab.variants import refuse_duplicates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from headloom.data import Corpus, TokenData
    from headloom.train import RunConfig


@dataclass(frozen=True)
class Plan:
    """Everything the runs of a study need.

    `runs` are resolved run configurations by (label, seed); `budgets` what each variant costs by label; `configs` what
    is compared for fairness and printed: a run's configuration with the attention's own, resolved.
    """

    spec: CompareSpec
    corpus: Corpus
    data: TokenData
    tokenizer: PreTrainedTokenizerFast
    runs: Mapping[tuple[str, int], RunConfig]
    budgets: Mapping[str, Mapping[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = field(default=())

    @property
    def resolved(self) -> dict[str, Any]:
        """What makes this study this one: specification, data, every variant's resolved configuration, versions."""
        from headloom.train.records import versions

        return {
            "spec": self.spec.model_dump(mode="json"),
            "data": {"corpus": self.corpus.fingerprint, "tokens": self.data.fingerprint},
            "configs": {label: dict(config) for label, config in self.configs.items()},
            "versions": versions(),
        }


def make_plan(spec: CompareSpec) -> Plan:
    """Load the data, match the budgets, and check that the runs differ in nothing else.

    Raises HeadloomError for data that cannot be used, options that do not fit the size, budgets that cannot be matched,
    equal variants, and unfair ones.
    """
    attentions = {variant.label: attention_config(spec, variant) for variant in spec.variants}  # cheap, so first
    refuse_duplicates({v.label: (v.mechanism, attentions[v.label]) for v in spec.variants})
    _check_folders(spec)

    from headloom.data import load_corpus, make_tokenizer, prepare
    from headloom.train.run import resolve

    corpus = load_corpus(spec.data)
    tokenizer = make_tokenizer(spec.tokenizer, [document.text for document in corpus.train])
    data = prepare(corpus, tokenizer, context=spec.tokens, validation_bytes=spec.validation_bytes)
    widths, budgets = _budgets(spec, data.vocab_size)
    runs = {
        (variant.label, seed): resolve(run_config(spec, variant, widths[variant.label], seed), data, tokenizer)
        for seed in spec.seeds
        for variant in spec.variants
    }
    configs = {
        variant.label: {
            "mechanism": variant.mechanism,
            **attentions[variant.label],
            **_settings(runs[variant.label, spec.seeds[0]]),
        }
        for variant in spec.variants
    }
    refuse_other_differences(configs, allowed_differences(spec), meaningless(spec))
    return Plan(spec, corpus, data, tokenizer, runs, budgets, configs)


def attention_config(spec: CompareSpec, variant: VariantSpec) -> dict[str, Any]:
    """The resolved attention; a HeadloomError names the variant whose options do not fit.

    {"attention": the config of every layer} for a mechanism. For a schedule "attention" is what its layers share, and
    "layers" what else each kind of layer is: {"0-3,5-8": {"mechanism": ..., option: value}}.
    """
    from headloom.attention import AttentionConfig, layer_config
    from headloom.attention.schedules import option_classes, places
    from headloom.core.config import fields_of

    try:
        specs = layer_specs(spec, variant)
        made = [layer_config(name, _shared(spec), options) for name, options in specs]
        classes = option_classes(variant.mechanism)
        if len(classes) == 1:
            return {"attention": made[0].to_dict()}
        of_schedule, common = fields_of(classes[0]), fields_of(AttentionConfig)
        given = {k: v for k, v in variant.options.items() if k in common and k not in of_schedule}
        shared = AttentionConfig(**{**_shared(spec), **given}).to_dict()
    except HeadloomError as error:
        raise HeadloomError(f"{variant.label}: {error}") from None
    kinds: dict[str, list[int]] = {}
    layers = [
        {"mechanism": name, **{k: v for k, v in config.to_dict().items() if k not in shared or shared[k] != v}}
        for (name, _), config in zip(specs, made, strict=True)
    ]
    for index, layer in enumerate(layers):
        kinds.setdefault(repr(layer), []).append(index)
    return {"attention": shared, "layers": {places(indices): layers[indices[0]] for indices in kinds.values()}}


def layer_specs(spec: CompareSpec, variant: VariantSpec) -> list[tuple[str, dict[str, Any]]]:
    """(mechanism, options) of every layer."""
    from headloom.attention.schedules import layers_of

    return layers_of(variant.mechanism, variant.options, num_layers=spec.num_layers, tokens=spec.tokens)


def allowed_differences(spec: CompareSpec) -> set[str]:
    """Keys in which runs may differ: the mechanism or schedule, its own options, the feed-forward width, the seed."""
    from headloom.attention import AttentionConfig
    from headloom.attention.config import BASE_FIELDS
    from headloom.attention.schedules import option_classes
    from headloom.core.config import fields_of

    common = set(fields_of(AttentionConfig)) - {"base", "num_kv_heads", *BASE_FIELDS}
    classes = [cls for variant in spec.variants for cls in option_classes(variant.mechanism)]
    own = {name for config_cls in classes for name in fields_of(config_cls)}
    return {"mechanism", "layers.", "intermediate_size", "seed"} | {f"attention.{name}" for name in own - common}


def meaningless(spec: CompareSpec) -> dict[str, set[str]]:
    """By label, the keys of the attention that make no difference: its mechanism has no use for them, or they follow
    from its base."""
    from headloom.attention import layer_config, mechanisms

    alone = [v for v in spec.variants if v.mechanism in mechanisms()]
    made = {v.label: layer_config(v.mechanism, _shared(spec), v.options) for v in alone}
    return {label: {f"attention.{name}" for name in {*c.without, *c.base_fields}} for label, c in made.items()}


def run_config(spec: CompareSpec, variant: VariantSpec, intermediate_size: int, seed: int) -> RunConfig:
    """One run's configuration."""
    from headloom.train import RunConfig

    # `rope_theta` is the model's: layers read it from there, so that all of them turn alike.
    specs = [
        (name, {option: value for option, value in options.items() if option != "rope_theta"})
        for name, options in layer_specs(spec, variant)
    ]
    return RunConfig(
        name=f"{variant.label}-seed{seed}",
        specs=specs[:1] if all(layer == specs[0] for layer in specs) else specs,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        intermediate_size=intermediate_size,
        tie_embeddings=spec.tie_embeddings,
        rope_theta=variant.options.get("rope_theta", spec.rope_theta),
        tokens=spec.tokens,
        batch_size=spec.batch_size,
        steps=spec.steps,
        learning_rate=spec.learning_rate,
        warmup_steps=spec.warmup_steps,
        seed=seed,
        threads=spec.threads,
    )


def count_parameters(spec: CompareSpec, variant: VariantSpec, vocab_size: int, intermediate_size: int) -> int:
    """Trainable numbers of the whole model, tied ones once, counted on the meta device."""
    from headloom.hf import build_model

    run = run_config(spec, variant, intermediate_size, 0)
    specs = [(layer.mechanism, dict(layer.options)) for layer in run.specs]
    model = build_model(
        specs * (run.num_layers // len(specs)),
        vocab_size=vocab_size,
        hidden_size=run.hidden_size,
        num_layers=run.num_layers,
        num_heads=run.num_heads,
        num_kv_heads=run.num_kv_heads,
        head_dim=run.head_dim,
        intermediate_size=intermediate_size,
        max_positions=run.tokens,
        tie_embeddings=run.tie_embeddings,
        rope_theta=run.rope_theta,
        device="meta",
    )
    return sum(parameter.numel() for parameter in model.parameters())


def _budgets(spec: CompareSpec, vocab_size: int) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    from headloom.bench.cost import layer_costs

    target = count_parameters(spec, spec.variant(spec.reference), vocab_size, spec.intermediate_size)
    widths: dict[str, int] = {}
    budgets: dict[str, dict[str, Any]] = {}
    for variant in spec.variants:
        if variant.label == spec.reference:
            widths[variant.label], parameters = spec.intermediate_size, target
        else:
            match = match_parameters(
                partial(count_parameters, spec, variant, vocab_size),
                target,
                start=spec.intermediate_size,
                label=variant.label,
                tolerance=TOLERANCE,
            )
            widths[variant.label], parameters = match.intermediate_size, match.parameters
        layers = layer_costs(layer_specs(spec, variant), tokens=spec.tokens, **_shared(spec))
        budgets[variant.label] = {
            "intermediate_size": widths[variant.label],
            "parameters": parameters,
            "attention_flops_per_token": sum(layer.flops_exact for layer in layers) / spec.tokens,
            "cache_bytes_per_token": sum(layer.cache_bytes_per_token for layer in layers),
            "cache_constant_bytes": sum(layer.cache_constant_bytes for layer in layers),
        }
    return widths, budgets


def _shared(spec: CompareSpec) -> dict[str, Any]:
    """What the model gives the attention of every layer."""
    return {
        "hidden_size": spec.hidden_size,
        "num_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
    }


def _settings(run: RunConfig) -> dict[str, Any]:
    """A run's configuration without its name and mechanism, which stand beside it resolved."""
    return {key: value for key, value in run.to_dict().items() if key not in ("name", "specs", "num_kv_heads")}


def _check_folders(spec: CompareSpec) -> None:
    folders = [run_folder(variant.label, 0) for variant in spec.variants]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            first, second = spec.variants[folders.index(folder)].label, spec.variants[place].label
            raise HeadloomError(f"the variants '{first}' and '{second}' would share the folder {folder}: leave one out")

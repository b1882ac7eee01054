"""From a study as written to one in which nothing is left open; contradictions are refused here, before any data."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from headloom.core.errors import HeadloomError, near
from headloom.core.machine import cores
from headloom.lab.spec.names import check_mechanism_name
from headloom.lab.spec.options import option_text, parse_options
from headloom.lab.spec.resolved import FIELDS, MOVES, BudgetSpec, Shape, StudySpec, Variant, first_complaint
from headloom.lab.spec.sizes import Size, feed_forward, gated_width, get_size
from headloom.lab.spec.study import WrittenStudy, WrittenVariant
from headloom.lab.spec.variants import defaults, labels_of, refuse_repeated, split_variant, with_defaults
from headloom.train import tracking
from headloom.train.config import evaluation_bytes

TOLERANCES = {"parameters": 0.005, "flops": 0.01, "cache": 0.01, "time": 0.01, "tokens": 0.01}


def resolve_study(study: WrittenStudy, *, kind: Literal["compare", "study"] = "study") -> StudySpec:
    """The study with everything filled in.

    Raises HeadloomError for names, options, axes, budgets and seeds that are unknown or contradict each other.
    """
    size = get_size(study.size)
    tracking.check_tracker(study.engine.track)
    if study.engine.name == "local" and not hasattr(os, "fork"):
        raise HeadloomError("engine local forks processes, which this system cannot do: use --engine inline")
    seeds = _seeds(study)
    rates = study.learning_rates or (size.learning_rate,)
    if len(set(rates)) < len(rates):
        raise HeadloomError(f"learning_rates {list(rates)} holds one twice: give each once")
    if study.extend_grid and len(rates) == 1:
        raise HeadloomError("extend_grid goes on beyond a grid, and there is one rate: give two learning_rates or more")
    for name in (*study.options, *(split_variant(entry.use)[0] for entry in study.variants)):
        check_mechanism_name(name)  # before torch is imported for options and configs
    backbone, sizes = _backbone(study.config)
    variants, reference = _variants(study, size, sizes)
    whole = study.validation_bytes or size.validation_bytes
    shortest = min(each.shape.tokens_trained for each in variants if each.shape and each.against is None)
    try:
        spec = StudySpec(
            kind=kind,
            name=study.name,
            title=study.title or study.name,
            question=study.question,
            size=size.name,
            variants=tuple(variants),
            reference=reference,
            budgets=tuple(
                BudgetSpec(
                    match=budget.match,
                    knobs=budget.knob,
                    tolerance=budget.tolerance or TOLERANCES[budget.match],
                    target=budget.target,
                    convention=budget.convention,
                )
                for budget in study.budgets
            ),
            axes=study.axes,
            tie_embeddings=size.tie_embeddings if backbone is None else None,
            rope_theta=size.rope_theta if backbone is None else None,
            backbone=backbone,
            config=study.config,
            seeds=seeds,
            grid_seeds=min(study.grid_seeds or len(seeds), len(seeds)),
            learning_rates=tuple(sorted(rates)),
            extend_grid=study.extend_grid,
            data=study.data,
            text_column=study.text_column,
            tokenizer=study.tokenizer,
            validation_bytes=whole,
            evaluations=study.evaluations,
            evaluation_bytes=min(whole, evaluation_bytes(shortest, study.evaluations)),
            selection_bytes=(study.selection_bytes or size.validation_bytes) if len(rates) > 1 else None,
            threads=study.threads or size.threads or cores(),
            device=None if study.device == "auto" else study.device,
            dtype=study.dtype,
            compile=study.compile,
            checkpoint_activations=study.checkpoint_activations,
        )
    except ValidationError as error:
        raise HeadloomError(first_complaint(error)) from None
    check_budgets(spec)
    return spec


def _backbone(config: str | None) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """The fields of a Hugging Face config, and its sizes as `Shape` names them."""
    if config is None:
        return None, {}
    from headloom.hf.grafting.backbone import read_backbone, sizes_of

    found = read_backbone(config)
    return found, sizes_of(found)


def _seeds(study: WrittenStudy) -> tuple[int, ...]:
    given = study.seeds
    if isinstance(given, int):
        if not 1 <= given <= 1000:
            raise HeadloomError(f"seeds must be a number of seeds from 1 to 1000, not {given!r}")
        given = tuple(range(given))
    if not given or len(set(given)) < len(given):
        raise HeadloomError(f"seeds must be a number, or seeds each given once, not {list(given)}")
    if study.statistics and len(given) < 2:
        raise HeadloomError(
            "one seed gives no interval and no p-value: give at least 2 seeds (3 are usual), or statistics: false"
        )
    return given


def _variants(study: WrittenStudy, size: Size, config: Mapping[str, int]) -> tuple[list[Variant], str]:
    """Every variant, swept, in every group; and the label of the (first) reference."""
    chosen = {name: parse_options(name, given.items()) for name, given in study.options.items()}
    swept = [variant for written in study.variants for variant in _swept(written, chosen)]
    used = [variant.mechanism for variant in swept]
    for name in chosen:
        if name not in used:
            raise HeadloomError(f"options.{name} sets nothing: no variant is one.{near(name, used)}")
    labels = iter(labels_of([variant for variant in swept if not variant.label]))
    names = [variant.label or next(labels) + _apart(variant.settings) for variant in swept]
    reference = _reference(study.reference, names)
    named = {variant.against for variant in swept}
    found = []
    for group in study.groups or ({},):
        # the first axis names a group; what else it sets follows from that
        suffix = next((f" {axis}={value}" for axis, value in group.items()), "")
        for name, variant in zip(names, swept, strict=True):
            settings: dict[str, int] = {**group, **variant.settings}  # type: ignore[dict-item]
            _declared(study, name, settings)
            against = variant.against or (None if name == reference or name in named else reference)
            if against is not None and (against not in names or against == name):
                raise HeadloomError(
                    f"{name} is to be compared with '{against}', which is no other variant.{near(against, names)}"
                )
            placed = {
                "label": name + suffix,
                "against": None if against is None else against + suffix,
                "group": suffix,
                "shape": shape_of(study, size, settings, name, config),
                "settings": settings,
            }
            found.append(variant.model_copy(update=placed))
    labels_found = [variant.label for variant in found]
    refuse_repeated(labels_found)
    if len(found) < 2:
        raise HeadloomError(f"a comparison needs at least two variants, not {len(found)} ('{','.join(labels_found)}')")
    return found, reference + found[0].group


def _swept(written: WrittenVariant, chosen: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
    """The variant, or one for every combination of the values it sweeps over; labelled only if it is by its author.

    chosen: mechanism -> options that win over the variant's own.
    """
    mechanism, pairs = split_variant(written.use)
    own = parse_options(mechanism, [*pairs, *written.options.items()])
    for key, values in written.sweep.items():
        if not values:
            raise HeadloomError(f"{written.use}: sweep.{key} is empty: give the values it takes")
    found = []
    for values in itertools.product(*written.sweep.values()):
        axes, options = {**written.set}, []
        for key, value in zip(written.sweep, values, strict=True):
            if key in FIELDS:
                axes[key] = value  # type: ignore[index]
            else:
                options.append((key, value))
        named = Variant(mechanism=mechanism, options={**own, **parse_options(mechanism, options)})
        variant = with_defaults(named, chosen.get(mechanism, {}))
        label = written.label or ""
        if written.label and written.sweep:
            label += "".join(f" {key}={option_text(variant.options[key])}" for key, _ in options) + _apart(axes)
        placed = {"label": label, "against": written.against, "settings": axes, "knobs": dict(written.knob)}
        found.append(variant.model_copy(update=placed))
    return found


def _apart(settings: Mapping[Any, int]) -> str:
    """The axes in which a variant is set apart, as the end of its label."""
    return "".join(f" {axis}={value}" for axis, value in settings.items())


def _declared(study: WrittenStudy, label: str, settings: Mapping[str, int]) -> None:
    for axis in settings:
        if axis not in study.axes:
            raise HeadloomError(
                f"{label} is set apart in {axis}, which the study does not declare, so the comparison would not be "
                f"fair: add it to axes (axes: [{', '.join([*study.axes, axis])}]), or give all variants the same {axis}"
            )


# the fields of a config, as a study calls them
_OF_CONFIG = {
    "num_layers": "layers",
    "hidden_size": "width",
    "num_heads": "heads",
    "head_dim": "head_dim",
    "intermediate_size": "F",
}


def shape_of(
    study: WrittenStudy, size: Size, settings: Mapping[str, int], label: str, config: Mapping[str, int] | None = None
) -> Shape:
    """The size's shape, with a Hugging Face config's, the study's backbone and a variant's own settings over it.

    Another width takes its feed-forward with it, and another number of heads or width the width of a head, unless
    they are given too.
    """
    backbone = {name: value for name, value in study.backbone.model_dump().items() if value is not None}
    given = {**backbone, **settings}
    base = {name: config[field] for field, name in _OF_CONFIG.items()} if config else {}
    if any(given.get(name, base.get(name)) != base.get(name) for name in ("width", "heads")):
        base.pop("head_dim", None)  # it follows
    if base and "width" in given:
        base["F"] = feed_forward(base["F"], base["width"], given["width"])
    given = {**base, **given}
    width, heads = given.get("width", size.hidden_size), given.get("heads", size.num_heads)
    if "head_dim" not in given and width % heads:
        raise HeadloomError(f"{label}: {heads} heads do not divide the width {width}: give head_dim, or other heads")
    same = width == size.hidden_size
    try:
        return Shape(
            num_layers=given.get("layers", size.num_layers),
            hidden_size=width,
            num_heads=heads,
            head_dim=given.get("head_dim", width // heads),
            intermediate_size=given.get("F", size.intermediate_size if same else gated_width(width)),
            tokens=given.get("tokens", study.tokens or size.tokens),
            batch_size=given.get("batch_size", study.batch_size or size.batch_size),
            steps=given.get("steps", study.steps or size.steps),
        )
    except ValidationError as error:
        raise HeadloomError(f"{label}: {first_complaint(error)}") from None


def _reference(given: str | None, names: Sequence[str]) -> str:
    if given is not None and given not in names:
        raise HeadloomError(f"reference '{given}' is no variant.{near(given, names)} They are: {', '.join(names)}")
    usual = defaults().reference
    return given or (usual if usual in names else names[0])


def check_budgets(spec: StudySpec) -> None:
    """Refuse budgets that no knob can keep, or that undo each other."""
    for variant in spec.variants:
        turned: dict[str, str] = {}
        kept: list[str] = []
        for budget in spec.budgets:
            labels = [other.label for other in spec.variants]
            if budget.target is not None and budget.target + variant.group not in labels:
                raise HeadloomError(
                    f"budget {budget.match}: target '{budget.target}' is no variant.{near(budget.target, labels)}"
                )
            if spec.target(budget, variant) is None:
                continue
            for knob in budget.knobs_of(variant):
                if knob == "heads":
                    _check_heads(spec, variant)
                _check_knob(variant, budget, knob, turned, kept)
                turned[knob] = budget.match
            kept.append(budget.match)


def _check_heads(spec: StudySpec, variant: Variant) -> None:
    if spec.backbone is None:
        return
    from headloom.hf.model.family import family_named

    family = family_named(spec.backbone["model_type"])
    if not family.free_head_dim:
        raise HeadloomError(
            f"{variant.label}: the heads of a {family.name} model fill its width, so their number cannot be turned "
            "while each keeps its width: turn another knob"
        )


def _check_knob(
    variant: Variant, budget: BudgetSpec, knob: str, turned: Mapping[str, str], kept: Sequence[str]
) -> None:
    what = f"{variant.label}: the budgets contradict each other: "
    if budget.match not in MOVES[knob]:
        moving = [name for name, moved in MOVES.items() if budget.match in moved]
        raise HeadloomError(f"{what}{knob} does not move {budget.match}; turn one of {', '.join(moving)}")
    if knob in turned:
        raise HeadloomError(f"{what}{knob} is turned for {turned[knob]} and for {budget.match}: name two knobs")
    if knob in variant.settings:
        raise HeadloomError(
            f"{what}{knob} is set to {variant.settings[knob]}, and turned for {budget.match}: do one of the two"
        )
    undone = [match for match in kept if match in MOVES[knob]]
    if undone:
        raise HeadloomError(
            f"{what}{knob}, turned for {budget.match}, would undo equal {undone[0]}: put {budget.match} first, turn "
            "another knob, or leave one of the two out"
        )

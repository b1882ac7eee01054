"""From a specification to runs: data, equal budgets, run configurations, costs. Nothing is trained here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.core.machine import versions
from headloom.lab.plan.budget import Match, turn_knobs
from headloom.lab.plan.fairness import refuse_other_differences
from headloom.lab.plan.layers import (
    Counts,
    allowed_differences,
    meaningless,
    resolved_attention,
    run_config,
)
from headloom.lab.plan.places import run_path
from headloom.lab.spec.resolved import BudgetSpec, Shape, StudySpec, Variant
from headloom.lab.spec.variants import refuse_duplicates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from headloom.data.corpus import Corpus
    from headloom.data.packing import TokenData, TokenStream
    from headloom.data.sources import Document
    from headloom.train.config import RunConfig


@dataclass(frozen=True)
class Plan:
    """Everything the runs of a study need.

    selection: what learning rates are chosen by, disjoint from `data.validation`, which is reported; None without a
    grid. shapes: label -> the shape after matching. matches: label -> what each budget came to.
    """

    spec: StudySpec
    corpus: Corpus
    data: TokenData
    selection: TokenStream | None
    tokenizer: PreTrainedTokenizerFast
    counts: Counts
    shapes: Mapping[str, Shape]
    matches: Mapping[str, tuple[Match, ...]]

    def run(self, label: str, seed: int, learning_rate: float | None = None) -> RunConfig:
        """One run's configuration, resolved against the data."""
        from headloom.train.run import resolve

        run = run_config(self.spec, self.spec.variant(label), self.shapes[label], seed, learning_rate)
        return resolve(run, self.data, self.tokenizer)

    def with_shapes(self, shapes: Mapping[str, Shape], matches: Mapping[str, tuple[Match, ...]]) -> Plan:
        """The plan with other shapes, once time has been matched too."""
        return dataclasses.replace(self, shapes=shapes, matches=matches)

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """Label -> a run's configuration with the attention's own, resolved: what is compared, and printed."""
        found = {}
        for variant in self.spec.variants:
            shape = self.shapes[variant.label]
            run = self.run(variant.label, self.spec.seeds[0]).to_dict()
            settings = {key: value for key, value in run.items() if key not in ("name", "specs", "num_kv_heads")}
            attention = resolved_attention(self.spec, variant, shape)
            found[variant.label] = {"mechanism": variant.mechanism, **attention, **settings}
        return found

    def costs(self) -> dict[str, dict[str, Any]]:
        """Label -> what it costs: parameters, FLOPs of training in both conventions, cache, steps, tokens."""
        found = {}
        for variant in self.spec.variants:
            shape = self.shapes[variant.label]
            flops = {c: self.counts.flops(variant, shape, c) for c in ("exact", "full")}
            found[variant.label] = {
                "shape": shape.model_dump(),
                "intermediate_size": shape.intermediate_size,
                "parameters": self.counts.parameters(variant, shape),
                **{f"training_flops_per_token_{c}": value for c, value in flops.items()},
                **{f"training_flops_{c}": value * shape.tokens_trained for c, value in flops.items()},
                **self.counts.attention(variant, shape),
                "steps": shape.steps,
                "tokens_trained": shape.tokens_trained,
                "matches": [match.to_dict() for match in self.matches[variant.label]],
            }
        return found

    @property
    def resolved(self) -> dict[str, Any]:
        """What makes study and folder belong together: specification, data, resolved configurations, versions. Taken
        before time is matched: what is measured must not change a study's name."""
        selection = None if self.selection is None else len(self.selection.ids)
        return {
            "spec": self.spec.model_dump(mode="json"),
            "data": {"corpus": self.corpus.fingerprint, "tokens": self.data.fingerprint, "selection": selection},
            "configs": self.configs,
            "versions": versions(),
        }


def make_plan(spec: StudySpec, on_corpus: Callable[[Corpus], None] | None = None) -> Plan:
    """Load the data, match the budgets (all but time), and check that the runs differ in nothing else.

    on_corpus: sees the text before it is tokenised, and may refuse it.

    Raises HeadloomError for data that cannot be used, options that do not fit the size, budgets that cannot be matched,
    equal variants, and unfair ones.
    """
    attentions = {variant.label: resolved_attention(spec, variant) for variant in spec.variants}  # cheap, so first
    refuse_duplicates(
        {v.label: (v.mechanism, {**attentions[v.label], **v.settings, "": repr(v.knobs)}) for v in spec.variants}
    )
    _check_folders(spec)

    from headloom.data.corpus import load_corpus
    from headloom.data.packing import prepare
    from headloom.data.tokenizer import make_tokenizer

    corpus = load_corpus(spec.data, text_column=spec.text_column)
    tokenizer = make_tokenizer(spec.tokenizer, [document.text for document in corpus.train])
    longest = max(shape.tokens for shape in spec.shapes.values())
    corpus, chosen_by = (corpus, None) if spec.selection_bytes is None else _split_validation(corpus, spec)
    if on_corpus is not None:
        on_corpus(corpus)
    data = prepare(
        corpus,
        tokenizer,
        context=longest,
        validation_bytes=spec.validation_bytes,
        leading_bytes=spec.evaluation_bytes,
    )
    selection = None
    if chosen_by is not None:
        selection = prepare(chosen_by, tokenizer, context=longest, validation_bytes=spec.selection_bytes).validation
    counts = Counts(spec, data.vocab_size)
    plan = Plan(spec, corpus, data, selection, tokenizer, counts, *match_budgets(spec, counts))
    refuse_other_differences(plan.configs, allowed_differences(spec), meaningless(spec))
    return plan


def match_budgets(spec: StudySpec, counts: Counts) -> tuple[dict[str, Shape], dict[str, tuple[Match, ...]]]:
    """Every variant's shape at the budgets that can be counted, one after the other."""
    shapes = spec.shapes
    matches: dict[str, tuple[Match, ...]] = {variant.label: () for variant in spec.variants}
    for budget in spec.budgets:
        if budget.match == "time":
            continue
        for variant in _targets_first(spec, budget):
            target = spec.target(budget, variant)
            if target is None:
                continue
            shape, match = turn_knobs(
                shapes[variant.label],
                budget.knobs_of(variant),
                partial(counts.budget, budget, variant),
                counts.budget(budget, spec.variant(target), shapes[target]),
                match=budget.match,
                label=variant.label,
                tolerance=budget.tolerance,
            )
            shapes[variant.label], matches[variant.label] = shape, (*matches[variant.label], match)
    return shapes, matches


def _targets_first(spec: StudySpec, budget: BudgetSpec) -> list[Variant]:
    """The variants in an order in which a target's own budgets come before those that are matched to it."""
    targets = {spec.target(budget, variant) for variant in spec.variants}
    return sorted(spec.variants, key=lambda variant: variant.label not in targets)


def _split_validation(corpus: Corpus, spec: StudySpec) -> tuple[Corpus, Corpus]:
    """The held-out documents in two halves, by a shuffle of their names: to report, and to choose learning rates by.

    A single document is cut in the middle.
    """
    from headloom.data.sources import Document

    held = sorted(corpus.validation, key=lambda document: document.name)
    if len(held) > 1:
        order = random.Random(0).sample(held, len(held))
        reported, chosen_by = order[: (len(held) + 1) // 2], order[(len(held) + 1) // 2 :]
    else:
        text = held[0].text
        middle = len(text) // 2
        if not text[:middle].strip() or not text[middle:].strip():
            raise HeadloomError(
                f"the held-out text of {corpus.title} is too small to be split in two, one part to choose learning "
                "rates by and one to report: give more text, or one learning rate"
            )
        reported, chosen_by = (
            [Document(held[0].name, text[:middle])],
            [Document(held[0].name, text[middle:])],
        )
    return _held(corpus, reported), _held(corpus, chosen_by)


def _held(corpus: Corpus, documents: Sequence[Document]) -> Corpus:
    return dataclasses.replace(corpus, validation=tuple(sorted(documents, key=lambda document: document.name)))


def _check_folders(spec: StudySpec) -> None:
    folders = [run_path(variant.label, 0) for variant in spec.variants]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            first, second = spec.variants[folders.index(folder)].label, spec.variants[place].label
            raise HeadloomError(f"the variants '{first}' and '{second}' would share the folder {folder}: leave one out")

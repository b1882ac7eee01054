"""What there is to choose from: every mechanism, what it remembers and computes, and whether it can be grafted.

The registry is asked and nothing is typed in: what is remembered is read off `cache_slots`, numbers are measured at one
size from the module built on the meta device, and whether a graft keeps the function is tried out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headloom.core.config import own_first
from headloom.core.errors import HeadloomError
from headloom.costs.count import Cost, config_cost
from headloom.costs.formula import cache_formula, letter_of
from headloom.mechanism import Attention, AttentionConfig, build_from_config, layer_config, mechanisms
from headloom.mechanism.schedules import schedules

SIZES = {"hidden_size": 768, "num_heads": 12, "head_dim": 64, "rope_theta": 10000.0}
TOKENS = 2048
"""The shape of the numbers: GPT-3's 125M."""

TERNARY = (
    'With `projection="bit"` the output projection rounds the result of attention to 255 levels. A cached and a full '
    "pass add that result up in different orders; where it stands halfway between two levels, to the last bit, they "
    "may take neighbouring ones, and the two passes then differ by one level in that token (about 1 token in 1,000 in "
    "float32). Queries, keys and values are the same bit for bit."
)
"""What ternary projections cannot promise."""

Options = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One mechanism.

    cache_elements: numbers a token leaves in a layer's cache, and cache_constant those of a sequence however long, with
    their closed forms; flops_class: how FLOPs between tokens (visible pairs) grow, and scores: what they are, over the
    reference's; parameters: of one layer; tiny: the size of the numbers does not suit the mechanism, so they are of its
    tiny config; grafts: a graft with its own defaults starts as the attention that was there.
    """

    name: str
    title: str
    paper: str
    summary: str
    cache_formula: str
    cache_elements: int
    constant_formula: str
    cache_constant: int
    flops_class: str
    scores: float
    parameters: int
    tiny: bool
    grafts: bool
    options: dict[str, Any]

    @property
    def cache(self) -> str:
        """Closed forms and numbers: "2 G K = 1,536"."""
        forms = ((self.cache_formula, self.cache_elements, ""), (self.constant_formula, self.cache_constant, " once"))
        return "; ".join(f"{form} = {number:,}{end}".removeprefix(" = ") for form, number, end in forms if number)

    @property
    def flops(self) -> str:
        """The class and the factor: "T^2, 1 x"."""
        return f"{self.flops_class}, {self.scores:.3g} x"


def entries(reference: str, options: Options | None = None) -> list[Entry]:
    """All mechanisms, by name. `options`: those that a mechanism is measured with, where not its own defaults."""
    options = options or {}
    usual = _measured(reference, {})[0]
    return [_entry(name, dict(options.get(name, {})), usual) for name in mechanisms()]


def _entry(name: str, options: dict[str, Any], usual: Cost) -> Entry:
    info = mechanisms()[name]
    found, tiny = _measured(name, options)
    if tiny:
        usual = config_cost(AttentionConfig(**{field: getattr(found.config, field) for field in _SHAPE}), tokens=TOKENS)
    growing, constant = cache_formula(info, found.config)
    return Entry(
        name=name,
        title=info.title,
        paper=info.paper,
        summary=info.summary,
        cache_formula=growing,
        cache_elements=found.cache_elements_per_token,
        constant_formula=constant,
        cache_constant=found.cache_constant_elements,
        flops_class=info.cls.flops_class or _growth(found),
        scores=found.core_flops_exact / usual.core_flops_exact,
        parameters=found.parameters,
        tiny=tiny,
        grafts=grafts_exactly(name),
        options={} if tiny else options,
    )


_SHAPE = ("hidden_size", "num_heads", "head_dim")


def _measured(name: str, options: Mapping[str, Any]) -> tuple[Cost, bool]:
    try:
        return config_cost(layer_config(name, SIZES, options), tokens=TOKENS), False
    except HeadloomError:
        return config_cost(mechanisms()[name].config_cls.tiny(), tokens=TOKENS), True


def _growth(found: Cost) -> str:
    """Whether twice the tokens cost twice or four times."""
    longer = config_cost(found.config, tokens=2 * found.tokens)
    return "T^2" if longer.core_flops_exact > 3 * found.core_flops_exact else "T"


def grafts_exactly(name: str) -> bool:
    """Whether the mechanism, built with its graft's defaults over the weights of plain attention, computes the same.

    Tried in float64, with as many key/value heads as heads and with fewer.
    """
    return any(_starts_as_plain(name, groups) for groups in (1, 2, 4))


@torch.no_grad()
def _starts_as_plain(name: str, num_kv_heads: int) -> bool:
    plain = AttentionConfig(hidden_size=24, num_heads=4, num_kv_heads=num_kv_heads, head_dim=6)
    shared = {field: getattr(plain, field) for field in (*_SHAPE, "num_kv_heads", "causal", "rope_theta")}
    try:
        made = layer_config(name, shared, mechanisms()[name].config_cls.graft_defaults({}))
    except HeadloomError:
        return False
    common = [field.name for field in dataclasses.fields(AttentionConfig) if field.name not in ("base", "dropout")]
    if not made.exact or any(getattr(made, field) != getattr(plain, field) for field in common):
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        old, new = Attention(plain).double().eval(), build_from_config(made).double().eval()
        for letter in "qkvo":
            ours: Any = getattr(new, f"{letter}_proj", None)
            theirs: Any = getattr(old, f"{letter}_proj")
            rows, columns = theirs.weight.shape
            if ours is None or ours.weight.shape[0] != rows or ours.weight.shape[1] < columns:
                return False
            ours.weight[:, :columns] = theirs.weight
        new.reset_heads()
        x = torch.randn(2, 9, plain.hidden_size, dtype=torch.double)
        return bool((new(x) - old(x)).abs().max() < 1e-10)


def markdown(reference: str, options: Options | None = None) -> str:
    """docs/mechanisms.md."""
    rows = entries(reference, options)
    given = [
        f"`{row.name}` with {', '.join(f'{key}={value}' for key, value in row.options.items())}"
        for row in rows
        if row.options
    ]
    small = [f"`{row.name}`" for row in rows if row.tiny]
    notes = [
        f"Numbers are measured from one layer of width {SIZES['hidden_size']} with {SIZES['num_heads']} heads of "
        f"{SIZES['head_dim']} over {TOKENS} tokens, each mechanism with its own defaults"
        + (f" ({'; '.join(given)})" if given else "")
        + ".",
        "*Cache*: numbers a token leaves in a layer, or a sequence once, in the letters of the table below. "
        "*Scores*: FLOPs between tokens, visible pairs, "
        f"in those of `{reference}`. *Graft*: put into a trained model, it starts as the function that was there.",
    ]
    if small:
        notes.append(f"Of {', '.join(small)} they are of the tiny config, which suits it better.")
    notes.append(TERNARY)
    head = ["name", "title", "paper", "cache", "scores", "parameters", "graft"]
    lines = [
        "# Mechanisms",
        "",
        "Made by `headloom list --markdown`; do not edit.",
        "",
        table_line(head),
        table_line(["---"] * 3 + ["---:"] * 3 + [":---:"]),
        *(
            table_line(
                [
                    f"`{row.name}`",
                    f"**{row.title}**: {row.summary}",
                    _link(row.paper),
                    row.cache,
                    row.flops,
                    f"{row.parameters:,}",
                    "yes" if row.grafts else "no",
                ]
            )
            for row in rows
        ),
        "",
        *(line for note in notes for line in (note, "")),
        "## Letters",
        "",
        table_line(["letter", "option"]),
        table_line(["---"] * 2),
        *(table_line([letter, f"`{field}`"]) for letter, field in _letters()),
        "",
        "## Schedules of layers",
        "",
        table_line(["name", "title", "paper", "of"]),
        table_line(["---"] * 4),
        *(
            table_line(
                [
                    f"`{found.name}`",
                    f"**{found.title}**: {found.summary}",
                    _link(found.paper),
                    ", ".join(f"`{part}`" for part in found.mechanisms) or "any",
                ]
            )
            for found in schedules().values()
        ),
    ]
    return "\n".join(lines) + "\n"


def table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _link(paper: str) -> str:
    return f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})" if paper else "none"


def _letters() -> list[tuple[str, str]]:
    """(letter, option) of every size, those of all mechanisms first."""
    classes: list[Any] = [AttentionConfig, *(info.config_cls for info in mechanisms().values())]
    pairs = [(letter_of(cls, field), field) for cls in classes for field in own_first(cls)]
    return [pair for pair in dict.fromkeys(pairs) if pair[0]]

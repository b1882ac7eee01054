"""`headloom cost`: parameters, FLOPs and cache of a mechanism at any size, counted from modules on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headloom.cli.common import Json, Size, console, ends_with_status, print_json
from headloom.cli.groups import MACHINE, MODEL, WHAT, in_panels

if TYPE_CHECKING:
    from headloom.costs.count import Cost
    from headloom.lab.spec.resolved import Variant


_AVERAGED = ("parameters", "flops_exact", "flops_full", "cache_bytes_per_token")
"""What is printed for each layer where the layers differ."""
TYPES = ("float32", "bfloat16", "float16", "float64")


@ends_with_status
@in_panels({WHAT: "settings", MODEL: "size tokens", MACHINE: "dtype as_json"})
def cost(
    variants: Annotated[
        str,
        typer.Argument(
            help="A mechanism or schedule, options after colons. Several, separated by commas: mha,iha,sas."
        ),
    ],
    size: Size = "tiny",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="hidden_size=768 for all variants; iha.pseudo_heads=2 for those of one name. Repeatable."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Sequence length. Default: the size's context.")] = None,
    dtype: Annotated[str, typer.Option(help="The type of cache and weights: float32, bfloat16, ...")] = "float32",
    as_json: Json = False,
) -> None:
    """Print the cost of a mechanism: one attention layer, and the whole model of a size; several side by side.

    FLOPs are those of the forward pass for one sequence, 2 per multiply-add. "full" counts all query-key pairs, "exact"
    only the visible ones. Options that are not given have the values that comparisons use.
    """
    from headloom.lab.spec.options import pieces

    names = [name for name in pieces(variants, ",") if name.strip()] or [variants]
    _check(names, size, tokens, dtype)
    found = [
        costs_of(name, size=size, settings=settings or [], tokens=tokens, dtype=dtype, all_of=names) for name in names
    ]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
    elif len(found) == 1:
        _show(found[0])
    else:
        _compare(found)


def _check(names: Sequence[str], size: str, tokens: int | None, dtype: str) -> None:
    """Raise HeadloomError for wrong values that can be found before torch is imported."""
    from headloom.core.errors import HeadloomError
    from headloom.lab.spec.sizes import get_size
    from headloom.lab.spec.variants import split_variant

    get_size(size)
    for name in names:
        split_variant(name)
    if tokens is not None and tokens < 1:
        raise HeadloomError(f"tokens must be at least 1, not {tokens}")
    if dtype not in TYPES:
        raise HeadloomError(f"dtype must be float32, bfloat16, float16 or float64, not '{dtype}'")


def _chosen(text: str, settings: Sequence[str], all_of: Sequence[str]) -> Variant:
    """A variant with the settings that apply to it: name=value for all variants, mechanism.name=value for its own."""
    from headloom.core.errors import unknown
    from headloom.lab.spec.options import parse_options, split_pair
    from headloom.lab.spec.resolved import OF_THE_SIZE
    from headloom.lab.spec.variants import parse_variant, split_variant, with_defaults

    mechanism, mechanisms = split_variant(text)[0], [split_variant(other)[0] for other in all_of]
    pairs = []
    for setting in settings:
        path, value = split_pair(setting, "--set")
        owner, dot, name = path.rpartition(".")
        if dot and owner not in mechanisms:
            raise unknown("variant in --set", owner, mechanisms)
        if owner in ("", mechanism):
            pairs.append((name, value))
    named = parse_variant(text)
    found = with_defaults(named, parse_options(named.mechanism, pairs), of_size=True)
    own = {name: v for name, v in found.options.items() if name not in (*OF_THE_SIZE, *found.defaulted)}
    return found.model_copy(update={"label": found.model_copy(update={"options": own}).text})


def costs_of(
    variant: str,
    *,
    size: str,
    settings: Sequence[str],
    tokens: int | None = None,
    dtype: str = "float32",
    all_of: Sequence[str] = (),
) -> dict[str, Any]:
    """What `headloom cost --json` prints for one variant. Settings override its options, and both override the size.

    all_of: the variants that settings may name.
    """
    from headloom.lab.spec.sizes import gated_width, get_size

    shape = get_size(size)
    named = _chosen(variant, settings, all_of or [variant])
    from headloom.costs.count import layer_costs
    from headloom.mechanism.schedules import over_depth, pattern_of, places

    options: dict[str, Any] = dict(named.options)
    shared: dict[str, Any] = {
        "hidden_size": options.pop("hidden_size", shape.hidden_size),
        "num_heads": options.pop("num_heads", shape.num_heads),
        "rope_theta": options.pop("rope_theta", shape.rope_theta),
    }
    if "head_dim" in options:
        shared["head_dim"] = options.pop("head_dim")
    length = shape.tokens if tokens is None else tokens
    pattern = pattern_of(named.mechanism, options, num_layers=shape.num_layers, tokens=length)
    specs = over_depth(pattern, shape.num_layers)
    layers = layer_costs(specs, tokens=length, dtype=dtype, **shared)
    kinds = [spec for place, spec in enumerate(specs) if spec not in specs[:place]]
    own_width = shared["hidden_size"] == shape.hidden_size
    backbone = {
        **{name: value for name, value in shared.items() if name in ("hidden_size", "num_heads")},
        "num_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size if own_width else gated_width(shared["hidden_size"]),
        "vocab_size": shape.vocab_size,
        "tie_embeddings": shape.tie_embeddings,
    }
    return {
        "variant": named.label,
        "mechanism": named.mechanism,
        "notes": named.notes,
        "size": size,
        "tokens": length,
        "dtype": dtype,
        **({"attention": layers[0].to_dict()} if len(kinds) == 1 else {}),
        "layers": [
            {
                "layers": places([place for place, spec in enumerate(specs) if spec == kind]),
                **layers[specs.index(kind)].to_dict(),
            }
            for kind in kinds
        ],
        "layer": {name: sum(getattr(layer, name) for layer in layers) / len(layers) for name in _AVERAGED},
        "relative": _relative(layers[: len(pattern)], shared, length),
        "model": {
            **backbone,
            "nominal_parameters": shape.nominal_parameters if own_width else None,
            **_model_cost(specs, {**shared, **backbone}, length, dtype),
            "cache_bytes_per_token": sum(layer.cache_bytes_per_token for layer in layers),
            "cache_bytes": sum(layer.cache_bytes for layer in layers),
            "cache_constant_bytes": sum(layer.cache_constant_bytes for layer in layers),
        },
    }


def _relative(layers: Sequence[Cost], shared: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The average cost of a layer's scores, relative to that of the usual reference, counted in three ways: all
    query-key pairs (as papers do), visible pairs of tokens, and as it is computed."""
    from headloom.costs.count import layer_costs
    from headloom.lab.spec.variants import defaults

    name = defaults().reference
    usual = layer_costs([(name, {})], tokens=tokens, **shared)[0]

    def average(count: str) -> float:
        return sum(getattr(layer, count) for layer in layers) / len(layers) / getattr(usual, count)

    return {
        "reference": name,
        "pattern": len(layers),
        "rectangle": average("core_flops_rectangle"),
        "causal": average("core_flops_causal"),
        "exact": average("core_flops_exact"),
    }


def _model_cost(
    specs: Sequence[tuple[str, dict[str, Any]]], sizes: dict[str, Any], tokens: int, dtype: str
) -> dict[str, int]:
    from headloom.costs.count import model_cost
    from headloom.hf import build_model

    model = build_model(specs, max_positions=tokens, device="meta", **sizes)
    return model_cost(model, tokens, dtype)


def _compare(found: Sequence[dict[str, Any]]) -> None:
    """Print one row per variant: one layer on average, then the whole model."""
    from rich.table import Table

    from headloom.report.tables import short

    tokens, dtype = found[0]["tokens"], found[0]["dtype"]
    reference = found[0]["relative"]["reference"]
    table = Table(pad_edge=False)
    headings = ("parameters", "FLOPs / token", f"scores ({reference} = 1)", "cache bytes / token", "parameters")
    for place, heading in enumerate(("variant", *headings, "FLOPs / token", "cache bytes / token")):
        whole = "model: " if place > len(headings) - 1 else "layer: " if place else ""
        table.add_column(whole + heading, justify="right" if place else "left", overflow="fold")
    for row in found:
        layer, model = row["layer"], row["model"]
        table.add_row(
            row["variant"],
            f"{layer['parameters']:,.0f}",
            short(layer["flops_exact"] / tokens),
            f"{row['relative']['exact']:.3g}",
            f"{layer['cache_bytes_per_token']:,.0f}",
            f"{model['parameters']:,}",
            short(model["flops_exact"] / tokens),
            f"{model['cache_bytes_per_token']:,}",
        )
    out = console()
    out.print(table)
    for line in dict.fromkeys(note for row in found for note in row["notes"]):
        out.print(line, markup=False, soft_wrap=True)
    constant = {row["variant"]: row["model"]["cache_constant_bytes"] for row in found}
    for name, bytes_once in constant.items():
        if bytes_once:
            line = f"{name}: {bytes_once:,} bytes of cache per sequence of any length, in the whole model."
            out.print(line, markup=False, soft_wrap=True)
    out.print(
        f"At size {found[0]['size']}, {tokens:,} tokens, one sequence, {dtype}; forward FLOPs of visible pairs. Where "
        "layers differ, the average is shown. Give one variant alone to see its parts.",
        markup=False,
        soft_wrap=True,
    )


def _show(found: dict[str, Any]) -> None:
    """Print the numbers of one variant: one layer, its steps, the whole model."""
    from rich.table import Table

    from headloom.report.tables import short

    out = console()
    tokens, model = found["tokens"], found["model"]

    def pair(exact: float, full: float) -> tuple[str, str]:
        return short(exact), short(full)

    def flops_table(per: str) -> Table:
        table = Table(pad_edge=False)
        table.add_column(per)
        table.add_column("visible pairs", justify="right")
        table.add_column("all pairs", justify="right")
        return table

    out.print(f"{found['variant']} at size {found['size']}, {tokens:,} tokens, one sequence", markup=False)
    for line in found["notes"]:
        out.print(line, markup=False, soft_wrap=True)
    for layer in found["layers"]:
        name = "" if "attention" in found else f", {layer['mechanism']} in {_places(layer['layers'])}"
        out.print(f"One attention layer{name}", markup=False, soft_wrap=True)
        parts = flops_table("forward FLOPs per token")
        for part in layer["parts"]:
            if part["flops_full"]:
                parts.add_row(part["title"], *pair(part["flops_exact"] / tokens, part["flops_full"] / tokens))
        parts.add_section()
        parts.add_row("together", *pair(layer["flops_exact_per_token"], layer["flops_full_per_token"]))
        parts.add_row(f"for {tokens:,} tokens", *pair(layer["flops_exact"], layer["flops_full"]))
        out.print(parts)
        for line in _lines(layer, found["dtype"]):
            out.print(line, markup=False, soft_wrap=True)
    relative = found["relative"]
    over = f", on average over {relative['pattern']} layers" if relative["pattern"] > 1 else ""
    out.print(
        f"scores, in those of {relative['reference']}{over}: {relative['rectangle']:.2f} as full rectangles (the "
        f"papers' count), {relative['causal']:.2f} by visible pairs of tokens, {relative['exact']:.2f} as computed",
        markup=False,
        soft_wrap=True,
    )
    out.print(
        f"\nThe whole model: {model['num_layers']} layers x {model['hidden_size']} x {model['num_heads']} heads, "
        f"feed-forward {model['intermediate_size']} (gated), vocabulary {model['vocab_size']:,} "
        f"({'tied' if model['tie_embeddings'] else 'untied'})",
        markup=False,
        soft_wrap=True,
    )
    whole = flops_table("forward FLOPs")
    whole.add_row("per token", *pair(model["flops_exact"] / tokens, model["flops_full"] / tokens))
    whole.add_row(f"for {tokens:,} tokens", *pair(model["flops_exact"], model["flops_full"]))
    out.print(whole)
    nominal = model["nominal_parameters"]
    also = f" (mha as the papers count it, 12 D^2 a layer and no norms: {nominal:,})" if nominal else ""
    out.print(f"parameters: {model['parameters']:,}{also}", markup=False, soft_wrap=True)
    out.print(_weights(model, found["dtype"]), markup=False, soft_wrap=True)
    out.print(
        f"cache per token: {model['cache_bytes_per_token']:,} bytes in {found['dtype']}; of {tokens:,} tokens, without "
        f"what windows no longer see: {model['cache_bytes']:,} bytes",
        markup=False,
        soft_wrap=True,
    )
    if model["cache_constant_bytes"]:
        out.print(f"and per sequence: {model['cache_constant_bytes']:,} bytes", markup=False, soft_wrap=True)


def _lines(layer: dict[str, Any], dtype: str) -> list[str]:
    """What one layer holds."""
    lines = [
        f"parameters: {layer['parameters']:,}",
        _weights(layer, dtype),
        f"cache per token: {layer['cache_bytes_per_token']:,} bytes in {dtype} "
        f"({layer['cache_elements_per_token']:,} numbers)",
    ]
    if layer["cache_constant_elements"]:
        lines.append(
            f"cache per sequence of any length: {layer['cache_constant_bytes']:,} bytes "
            f"({layer['cache_constant_elements']:,} numbers, float32 at least)"
        )
    if layer["config"]["window"] is not None:
        lines.append(f"window: {layer['config']['window']:,} tokens with the token itself; older ones are not cached")
    if layer["simulation_multiply_adds"]:
        lines.append(f"simulating heads, one tensor: {layer['simulation_multiply_adds']:,} multiply-adds per token")
    return lines


def _weights(found: dict[str, Any], dtype: str) -> str:
    plain, packed = found["parameter_bytes"], found["parameter_bytes_packed"]
    less = f"; {packed:,} bytes packed for inference" if packed != plain else ""
    return f"weights: {plain:,} bytes in {dtype}{less}"


def _places(layers: str) -> str:
    return f"layer {layers}" if layers.isdigit() else f"layers {layers}"

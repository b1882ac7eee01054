"""`headloom cost`: parameters, FLOPs and cache of a mechanism at any size, counted from modules on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from headloom.cli.common import Json, Size, console, ends_with_status, print_json


@ends_with_status
def cost(
    variant: Annotated[str, typer.Argument(help="A mechanism, with options after colons: iha:pseudo_heads=2.")],
    size: Size = "tiny",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="pseudo_heads=2, hidden_size=768, num_heads=12, ... Repeatable.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Sequence length. Default: the size's context.")] = None,
    dtype: Annotated[str, typer.Option(help="The type of the cache: float32, bfloat16, ...")] = "float32",
    as_json: Json = False,
) -> None:
    """Print what a mechanism costs: one attention layer, and the whole model of that size.

    FLOPs count 2 per multiply-add, forward, for one sequence; "full" counts all query-key pairs, "exact" the visible
    ones only.
    """
    found = costs(variant, size=size, settings=settings or [], tokens=tokens, dtype=dtype)
    if as_json:
        print_json(found)
    else:
        _show(found)


def costs(
    variant: str, *, size: str, settings: Sequence[str], tokens: int | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """What `headloom cost --json` prints. Settings win over the variant's options, and both over the size."""
    from headloom.bench.cost import cost as layer_cost
    from headloom.lab.sizes import gated_width, get_size
    from headloom.lab.variants import parse_options, parse_variant, split_pair

    shape = get_size(size)
    named = parse_variant(variant)
    pairs = [split_pair(setting, "--set") for setting in settings]
    given = parse_options(named.mechanism, [(name.removeprefix(f"{named.mechanism}."), text) for name, text in pairs])
    options: dict[str, Any] = {"rope_theta": shape.rope_theta, **named.options, **given}
    sizes = {
        "hidden_size": options.pop("hidden_size", shape.hidden_size),
        "num_heads": options.pop("num_heads", shape.num_heads),
    }
    length = shape.tokens if tokens is None else tokens
    attention = layer_cost(named.mechanism, tokens=length, dtype=dtype, **sizes, **options)
    own_width = sizes["hidden_size"] == shape.hidden_size
    backbone = {
        **sizes,
        "num_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size if own_width else gated_width(sizes["hidden_size"]),
        "vocab_size": shape.vocab_size,
        "tie_embeddings": shape.tie_embeddings,
    }
    return {
        "mechanism": named.mechanism,
        "size": size,
        "tokens": length,
        "dtype": dtype,
        "attention": attention.to_dict(),
        "model": {
            **backbone,
            "nominal_parameters": shape.nominal_parameters if own_width else None,
            **_model_cost(named.mechanism, options, backbone, length),
            "cache_bytes_per_token": attention.cache_bytes_per_token * shape.num_layers,
        },
    }


def _model_cost(mechanism: str, options: dict[str, Any], backbone: dict[str, Any], tokens: int) -> dict[str, int]:
    from headloom.bench.cost import model_cost
    from headloom.hf import build_model

    layer = {name: value for name, value in options.items() if name not in ("head_dim", "rope_theta")}
    model = build_model(
        (mechanism, layer),
        head_dim=options.get("head_dim"),
        rope_theta=options["rope_theta"],
        max_positions=tokens,
        device="meta",
        **backbone,
    )
    return model_cost(model, tokens)


def _show(found: dict[str, Any]) -> None:
    """The numbers for people: one layer, its steps, the model."""
    from rich.table import Table

    from headloom.report.tables import short

    out = console()
    tokens, layer, model = found["tokens"], found["attention"], found["model"]

    def pair(exact: float, full: float) -> tuple[str, str]:
        return short(exact), short(full)

    def flops_table(per: str) -> Table:
        table = Table(pad_edge=False)
        table.add_column(per)
        table.add_column("visible pairs", justify="right")
        table.add_column("all pairs", justify="right")
        return table

    out.print(f"{found['mechanism']} at size {found['size']}, {tokens:,} tokens, one sequence", markup=False)
    out.print("One attention layer")
    parts = flops_table("forward FLOPs per token")
    for part in layer["parts"]:
        if part["flops_full"]:
            parts.add_row(part["title"], *pair(part["flops_exact"] / tokens, part["flops_full"] / tokens))
    parts.add_section()
    parts.add_row("together", *pair(layer["flops_exact_per_token"], layer["flops_full_per_token"]))
    parts.add_row(f"for {tokens:,} tokens", *pair(layer["flops_exact"], layer["flops_full"]))
    out.print(parts)
    lines = [
        f"parameters: {layer['parameters']:,}",
        f"cache per token: {layer['cache_bytes_per_token']:,} bytes in {found['dtype']} "
        f"({layer['cache_elements_per_token']:,} numbers)",
    ]
    if layer["simulation_multiply_adds"]:
        lines.append(f"simulating heads, one tensor: {layer['simulation_multiply_adds']:,} multiply-adds per token")
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
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
    out.print(
        f"cache per token: {model['cache_bytes_per_token']:,} bytes in {found['dtype']}", markup=False, soft_wrap=True
    )

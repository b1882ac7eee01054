"""`headloom bench`: speed, memory and generation of the mechanisms, in turns (A B C A B C ...) after a warm-up.

Medians and quartiles are printed; use of peak is over the fastest matrix product of the same run (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headloom.cli.common import (
    INTERRUPTED,
    Json,
    Size,
    console,
    ends_with_status,
    only_json_on_stdout,
    print_json,
    whole_numbers,
    words,
)
from headloom.cli.groups import MACHINE, MODEL, WHAT, in_panels, with_groups
from headloom.core.errors import HeadloomError, unknown

if TYPE_CHECKING:
    from headloom.bench.asked import ModelSize, Named, Sizes
    from headloom.bench.setting import Peak, Setting

TRAINING = ("step", "train")
"""The modes of `speed` that time whole models."""
PANELS = {
    WHAT: "variants settings modes part against against_plain against_hf",
    MODEL: "size sizes hidden_size heads kv_heads head_dim tokens contexts new_tokens batch_size",
    MACHINE: "device dtype threads return_memory compile repeats markdown out as_json",
}

bench = typer.Typer(
    help="Speed, memory and generation of the mechanisms, measured side by side on this machine.", no_args_is_help=True
)

Tokens = Annotated[str | None, typer.Option(help="Lengths: 512,2048. Default: the size's context.")]
Repeats = Annotated[int, typer.Option(help="Timed repetitions of each.")]
Against = Annotated[
    str | None, typer.Option(help="Your own module: package.module:Class or file.py:Class, options after colons.")
]
AgainstPlain = Annotated[
    bool, typer.Option("--against-plain", help="Also time a straightforward implementation with the same weights.")
]
AgainstHf = Annotated[
    bool, typer.Option("--against-hf", help="Also time transformers' own model (modes step and train).")
]
Compile = Annotated[bool, typer.Option("--compile", help="Also time each with torch.compile; compilation is separate.")]


@dataclasses.dataclass(frozen=True)
class Common:
    """The options of every benchmark: what is measured, where, and where the result goes."""

    variants: Annotated[
        str | None,
        typer.Option(help="mha,iha:pseudo_heads=2,...: ratios are relative to the first. Default: those of compare."),
    ] = None
    settings: Annotated[list[str] | None, typer.Option("--set", help="iha.pseudo_heads=2. Repeatable.")] = None
    batch_size: Annotated[
        str | None, typer.Option("--batch-size", help="Sequences per call. Default: 1; for models 1,4.")
    ] = None
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu"
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, ... Default: float32 on CPU, bfloat16 on CUDA.")
    ] = None
    threads: Annotated[int | None, typer.Option(help="Threads of PyTorch. Default: PyTorch's own number.")] = None
    return_memory: Annotated[
        bool,
        typer.Option(
            "--return-memory",
            help="Return freed memory to the system, as glibc does by default. Without it, it is kept (faster).",
        ),
    ] = False
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json, bench.md and figures (SVG, PNG).")] = None
    as_json: Json = False

    def check(self) -> None:
        """Raise HeadloomError for options that no benchmark accepts, before torch is imported."""
        from headloom.lab.spec.variants import check_variants

        if self.markdown and self.as_json:
            raise HeadloomError("--markdown and --json cannot go together: give one")
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise HeadloomError(f"--out must be a folder, and '{self.out}' is a file")
        check_variants(self.variants, self.settings or [], at_least=1)

    def named(self) -> list[Named]:
        """The variants to measure."""
        from headloom.bench.asked import Named
        from headloom.lab.spec.variants import parse_variants

        parsed = parse_variants(self.variants, self.settings or [], at_least=1)
        return [Named(found.label, found.mechanism, dict(found.options), tuple(found.notes)) for found in parsed]

    def setting(self, repeats: int) -> Setting:
        from headloom.bench.setting import Setting

        def say(text: str) -> None:
            typer.echo(text, err=True)

        return Setting(device=self.device, dtype=self.dtype, threads=self.threads, repeats=repeats, say=say)


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The options that set the size of a layer."""

    size: Size = "tiny"
    hidden_size: Annotated[int | None, typer.Option("--hidden-size", help="D. Default: the size's.")] = None
    heads: Annotated[int | None, typer.Option("--heads", help="H. Default: the size's.")] = None
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="G. Default: each mechanism's own.")] = None
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="K. Default: D / H.")] = None

    def shape(self) -> ModelSize:
        """The whole model of the size, with these sizes of its layers."""
        from headloom.bench.asked import ModelSize
        from headloom.lab.spec.sizes import gated_width, get_size

        found, sizes = get_size(self.size), self.sizes()
        own = sizes.hidden_size == found.hidden_size
        arguments = {
            **sizes.given(),
            "num_layers": found.num_layers,
            "intermediate_size": found.intermediate_size if own else gated_width(sizes.hidden_size),
            "vocab_size": found.vocab_size,
            "tie_embeddings": found.tie_embeddings,
        }
        return ModelSize(found.name, found.tokens, arguments)

    def sizes(self) -> Sizes:
        from headloom.bench.asked import Sizes
        from headloom.lab.spec.sizes import get_size

        found = get_size(self.size)
        width = found.hidden_size if self.hidden_size is None else self.hidden_size
        heads = found.num_heads if self.heads is None else self.heads
        return Sizes(width, heads, self.kv_heads, self.head_dim, found.rope_theta)


@bench.command("speed")
@ends_with_status
@in_panels(PANELS)
@with_groups
def speed(
    common: Common,
    layer: LayerOptions,
    tokens: Tokens = None,
    modes: Annotated[
        str,
        typer.Option(
            help="For a layer: forward, backward (both passes). For a whole model: step (both passes and AdamW), "
            "train (a step in the training loop of headloom train)."
        ),
    ] = "forward,backward",
    part: Annotated[str, typer.Option(help="layer, or scores: only the attention core, from given q, k, v.")] = "layer",
    against: Against = None,
    against_plain: AgainstPlain = False,
    against_hf: AgainstHf = False,
    compile: Compile = False,
    repeats: Repeats = 5,
) -> None:
    """Time one layer (or only its scores), forward and with the backward pass, or a model's whole training step."""
    from headloom.bench.asked import MODES, check_counts, check_layers, check_models

    common.check()
    chosen = words(modes)
    for mode in chosen:
        if mode not in (*MODES, *TRAINING):
            raise unknown("mode", mode, (*MODES, *TRAINING))
    of_layers = [mode for mode in MODES if mode in chosen]
    of_models = [mode for mode in TRAINING if mode in chosen]
    if (against is not None or against_plain) and not of_layers:
        raise HeadloomError("--against and --against-plain need the mode forward or backward: add one to --modes")
    if part != "layer" and of_models:
        raise HeadloomError(
            f"--part {part} can be timed in the modes forward and backward only: remove the others from --modes"
        )
    if against_hf and not of_models:
        raise HeadloomError("--against-hf needs whole training steps: add --modes step (or train)")
    sizes, shape = layer.sizes(), layer.shape()
    points: dict[str, Any] = {
        "tokens": whole_numbers("tokens", tokens, [shape.tokens]),
        "batch_sizes": whole_numbers("batch-size", common.batch_size, [1]),
        "compile": "inductor" if compile else None,
    }
    check_counts({"tokens": points["tokens"], "batch-size": points["batch_sizes"]})
    if of_layers:
        check_layers(part, against=against, plainly=against_plain, compiled=compile)
    how = common.setting(repeats)
    if of_models:
        check_models(of_models, compiled=compile, dtype=how.dtype)
    named = common.named()

    def measure(how: Setting, peak: Peak) -> None:
        from headloom.bench import layers, models

        if of_layers:
            forms: dict[str, Any] = {"modes": of_layers, "part": part, "against": against, "plainly": against_plain}
            layers.speed(named, sizes, how, peak=peak, **forms, **points)
        if of_models:
            models.steps(named, [shape], how, peak=peak, modes=of_models, original=against_hf, **points)

    _run("speed", how, named, measure, common, {"sizes": sizes.given(), "compiled": compile})


@bench.command("memory")
@ends_with_status
@in_panels(PANELS)
@with_groups
def memory(
    common: Common,
    layer: LayerOptions,
    tokens: Tokens = None,
    against: Against = None,
    against_plain: AgainstPlain = False,
) -> None:
    """Measure the peak memory of one layer above its weights and input, forward and with the backward pass."""
    from headloom.bench.asked import check_counts, check_layers

    common.check()
    sizes, lengths = layer.sizes(), whole_numbers("tokens", tokens, [layer.shape().tokens])
    batches = whole_numbers("batch-size", common.batch_size, [1])
    check_counts({"tokens": lengths, "batch-size": batches})
    check_layers("layer", against=against, plainly=against_plain, compiled=False)
    how, named = common.setting(1), common.named()

    def measure(how: Setting, _: Peak) -> None:
        from headloom.bench import layers

        others: dict[str, Any] = {"against": against, "plainly": against_plain}
        layers.memory(named, sizes, how, tokens=lengths, batch_sizes=batches, **others)

    _run("memory", how, named, measure, common, {"sizes": sizes.given()})


@bench.command("decode")
@ends_with_status
@in_panels(PANELS)
@with_groups
def decode(
    common: Common,
    layer: LayerOptions,
    contexts: Annotated[str | None, typer.Option(help="Prompt lengths: 512,4096. Default: the size's context.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Timed tokens after each.")] = 16,
    repeats: Repeats = 3,
) -> None:
    """Time generation with a cache in one layer (the prompt, then each new token), and count the bytes of the cache."""
    from headloom.bench.asked import check_counts

    common.check()
    sizes, lengths = layer.sizes(), whole_numbers("contexts", contexts, [layer.shape().tokens])
    batches = whole_numbers("batch-size", common.batch_size, [1])
    check_counts({"contexts": lengths, "batch-size": batches, "new-tokens": [new_tokens]})
    how, named = common.setting(repeats), common.named()

    def measure(how: Setting, _: Peak) -> None:
        from headloom.bench.decode import decode as measured

        measured(named, sizes, how, contexts=lengths, batch_sizes=batches, new_tokens=new_tokens)

    about = {"sizes": sizes.given(), "new_tokens": new_tokens}
    _run("decode", how, named, measure, common, about)


@bench.command("models")
@ends_with_status
@in_panels(PANELS)
@with_groups
def models(
    common: Common,
    sizes: Annotated[str, typer.Option(help="Model sizes.")] = "125M,350M,1.3B,2.4B,2.7B",
    tokens: Tokens = None,
    modes: Annotated[
        str,
        typer.Option(
            help="One or more of step (both passes and AdamW), backward (both passes only: half the memory), "
            "train (a step in the training loop of headloom train)."
        ),
    ] = "step",
    against_hf: AgainstHf = False,
    compile: Compile = False,
    repeats: Repeats = 3,
) -> None:
    """Time training steps of whole models, by size and micro-batch. Models too large for the memory are only listed."""
    from headloom.bench.asked import check_counts, check_models

    common.check()
    shapes = [LayerOptions(size=name).shape() for name in words(sizes)]
    points: dict[str, Any] = {
        "tokens": whole_numbers("tokens", tokens, []),
        "batch_sizes": whole_numbers("batch-size", common.batch_size, [1, 4]),
        "modes": words(modes),
        "compile": "inductor" if compile else None,
    }
    check_counts({"tokens": points["tokens"], "batch-size": points["batch_sizes"]})
    how = common.setting(repeats)
    check_models(points["modes"], compiled=compile, dtype=how.dtype)
    named = common.named()

    def measure(how: Setting, peak: Peak) -> None:
        from headloom.bench.models import steps

        steps(named, shapes, how, original=against_hf, peak=peak, **points)

    _run("models", how, named, measure, common, {"compiled": compile})


def _run(
    name: str,
    how: Setting,
    named: Sequence[Named],
    measure: Callable[[Setting, Peak], None],
    common: Common,
    about: dict[str, Any],
) -> None:
    """Measure, print and write. Each measurement is kept at once (with --out on disk): stopping loses nothing."""
    from headloom.bench.setting import Peak
    from headloom.core import heap
    from headloom.report import bench as report

    out = common.out
    if not common.return_memory:
        heap.keep_freed()
    elif heap.freed_memory() is None:
        raise HeadloomError(
            "--return-memory works with glibc only, and this system has another C library: leave it out"
        )
    elif heap.freed_memory() == "kept":
        raise HeadloomError("this process already keeps freed memory, for good: use --return-memory in a new process")
    with only_json_on_stdout(common.as_json) as stream, how.active():
        best = Peak(how)
        result: dict[str, Any] = {
            "benchmark": name,
            **how.to_dict(),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
            "variants": {each.label: {"mechanism": each.mechanism, "options": dict(each.options)} for each in named},
            "notes": [note for each in named for note in each.notes],
            **about,
            "rows": [],
            "skipped": [],
            "interrupted": True,  # until the last point is done
        }

        def keep(rows: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]] = ()) -> None:
            result["rows"] += rows
            result["skipped"] += skipped
            if best.flops_per_second:
                result["peak"] = best.to_dict()
            if out is not None:
                report.write_data(result, out)

        stopped: BaseException | None = None
        try:
            measure(dataclasses.replace(how, keep=keep), best)
            result["interrupted"] = False
        except (KeyboardInterrupt, Exception) as error:
            if not result["rows"]:
                raise
            stopped = error
        if out is not None:
            for path in report.write(result, out):
                typer.echo(f"wrote {path}", err=True)
        if common.as_json:
            print_json(result, stream)
        elif common.markdown:
            typer.echo(report.markdown(result), nl=False)
        else:
            _show(result)
    if isinstance(stopped, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if stopped is not None:
        raise stopped


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from headloom.report import bench as report

    screen = console()
    for found in report.tables(result):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place, heading in enumerate(found.headings):
            table.add_column(heading, justify="right" if place else "left", overflow="fold")
        for row in found.rows:
            table.add_row(*row)
        screen.print(table)
    for note in report.notes(result):
        screen.print(note, markup=False, soft_wrap=True)

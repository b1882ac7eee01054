"""Study folders made of invented numbers: a bare one, and one with everything that a study may record."""

import dataclasses
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from report.reading import HOSTILE

from headloom.records.results import Difference
from headloom.report.page import write_report

RATES = (1e-3, 3e-3, 1e-2)
REASON = "its loss is nan at step 17"
NO_DIFFERENCE = dict.fromkeys([field.name for field in dataclasses.fields(Difference)])


def _metrics(place, steps, rate, step_seconds, flops):
    """The lines of metrics.jsonl: losses that fall to a floor which a wrong learning rate lifts. With FLOPs, as the
    newer format counts them, four evaluations along the way."""
    floor = 1.7 + 0.03 * place + 0.08 * math.log10(rate / 3e-3) ** 2
    for step in range(1, steps + 1):
        yield {
            "kind": "train",
            "step": step,
            "tokens": step * 512,
            "seconds": step * step_seconds,
            "loss": floor + 3.5 * math.exp(-step / 25) + random.gauss(0, 0.05),
            "learning_rate": rate,
            "grad_norm": 1.0,
            "flops": step * flops if flops else None,
        }
        if flops and step % (steps // 4) == 0:
            point = {"kind": "curve", "step": step, "tokens": step * 512, "flops": step * flops}
            yield point | {
                "seconds": step * step_seconds,
                "bits_per_byte": 2.4 + 0.01 * place + 4 * math.exp(-step / 9),
                "validation_loss": 1.6,
            }
    end = {"kind": "eval", "step": steps, "tokens": steps * 512, "flops": None, "seconds": steps * step_seconds}
    yield {**end, "bits_per_byte": 2.4, "validation_loss": 1.6}


def write_mixes(path, layers=4, heads=8, pseudo=2):
    """Mixes as IHA's: near the identity over heads, with a perturbation that grows with the layer."""
    generator = np.random.default_rng(layers)
    eye, found = np.eye(heads), {}
    for layer in range(layers):
        for name in ("q_mix", "k_mix", "v_mix", "out_mix"):
            base = eye[:, :, None] / pseudo if name == "out_mix" else eye[:, None, :]
            shape = (heads, heads, pseudo) if name == "out_mix" else (heads, pseudo, heads)
            noise = generator.normal(0, 0.05 + 0.03 * layer, shape)
            found[f"model.layers.{layer}.self_attn.{name}.weight"] = (base + noise).astype(np.float32)
    np.savez(path, **found)


def _spread(values):
    mean = sum(values.values()) / len(values) if values else None
    return {"n": len(values), "mean": mean, "sd": 0.004 if len(values) > 1 else None, "values": values}


def write_study(
    folder: Path,
    labels=("mha", "gqa", "iha", "sas"),
    seeds=(0, 1, 2),
    steps=120,
    title="invented text",
    rates=(),
    mixes=(),
    failed=(),
    layers=4,
):
    """Write study.json, results.json and metrics; returns the results as written.

    rates: the learning-rate grid of a study with everything (its second is chosen, for the last variant its last);
    none: a bare one, without a grid, evaluations along the way, and readings at equal time. mixes: labels
    whose runs leave mixes.npz. failed: (label, seed) of runs that failed.
    """
    random.seed(0)
    new = bool(rates)
    variants, runs = [], []
    for place, label in enumerate(labels):
        last = place == len(labels) - 1
        best = (rates[-1] if last else rates[1]) if new else 3e-3
        own_steps = steps if not new else round(steps / (1 + 0.1 * place))
        step_seconds, flops, values = 0.05 * (1 + place), 1e9 * (1 + 0.3 * place), {}
        for rate in rates or (best,):
            for seed in seeds:
                name = f"runs/v{place}-lr{rate:g}-seed{seed}" if new else f"runs/v{place}-seed{seed}"
                (folder / name).mkdir(parents=True)
                with open(folder / name / "metrics.jsonl", "w") as stream:
                    for record in _metrics(place, own_steps, rate, step_seconds, flops if new else None):
                        stream.write(json.dumps(record) + "\n")
                run = {"variant": label, "seed": seed, "learning_rate": rate, "folder": name, "chosen": rate == best}
                runs.append(run)
                has_mixes = label in mixes and rate == best
                if has_mixes:
                    write_mixes(folder / name / "mixes.npz", layers)
                if (label, seed) in failed and rate == best:
                    run |= {"status": "failed", "reason": REASON}
                    continue
                bits = 2.4 + 0.01 * place * (-1) ** place + random.gauss(0, 0.004)
                run |= {
                    "status": "finished",
                    "bits_per_byte": bits,
                    "selection_bits_per_byte": bits + 0.02 if new else None,
                    "perplexity": 5.2,
                    "train_seconds": own_steps * step_seconds + random.random(),
                    "tokens_per_second": 512 / step_seconds,
                    "parameters": 853_120 + place,
                    "weights": "ab" * 32,
                    "step_time": step_seconds,
                    "mixes": has_mixes,
                    "pictures": False,
                }
                if rate == best:
                    values[str(seed)] = bits
        mean = sum(values.values()) / len(values)
        variant = {
            "label": label,
            "mechanism": label,
            "options": {"pseudo_heads": 2} if place == 2 else {},
            "against": labels[0] if place else None,
            "settings": {},
            "shape": {
                **{"num_layers": 4, "hidden_size": 128, "num_heads": 8, "head_dim": 16},
                **{"intermediate_size": 344 - place, "tokens": 65, "batch_size": 8, "steps": own_steps},
            },
            "intermediate_size": 344 - place,
            "parameters": 853_120 + place,
            "parameters_relative": place * 1e-4,
            "training_flops_per_token_exact": flops / 512,
            "training_flops_per_token_full": 1.2 * flops / 512,
            "training_flops_exact": flops * own_steps,
            "training_flops_full": 1.2 * flops * own_steps,
            "attention_flops_per_token": 1_234_567 * (1 + place),
            "cache_bytes_per_token": 4096,
            "cache_constant_bytes": 0,
            "cache_bytes": 4096 * 65,
            "steps": own_steps,
            "tokens_trained": own_steps * 512,
            "matches": [],
            "planned_seconds": None,
            "step_time": {"median": step_seconds, "low": 0.049, "high": 0.06, "repeats": 7, "samples": []},
            "learning_rate": best,
            "grid": [],
            "grid_added": 0,
            "grid_edge": False,
            "at_time": None,
            "step_ratio": 1.0 + place,
            "bits_per_byte": _spread(values),
            "difference": None
            if place == 0
            else {
                **NO_DIFFERENCE,
                "n": 3,
                "mean": mean - 2.4,
                "half_width": 0.008,
                "low": mean - 2.408,
                "high": mean - 2.392,
                "p": 0.01,
                "p_holm": 0.03,
                "verdict": ["same", "better", "worse", "same"][place % 4],
            },
            "failed": [
                {"seed": seed, "learning_rate": best, "reason": REASON} for name, seed in failed if name == label
            ],
        }
        if new:
            variant |= _more(variant, place, best, rates, seeds, own_steps, last)
        variants.append(variant)
    results = {
        "format": 2,
        "hash": "abc123",
        "status": "failed" if failed else "complete",
        "reference": labels[0],
        "variants": variants,
        "runs": runs,
        "headlines": [f"{label} is something against {labels[0]}." for label in labels[1:]],
        "notes": [f"{labels[-1]} runs with pseudo_heads=2."],
        "condition": "at equal parameters",
        "summary": "",
        "time_summary": "",
        "warnings": [],
        "pairs": [],
        "quality_text": "bits per byte: counted somehow",
        "curve_text": "",
        "config_differences": {"mechanism": {label: label for label in labels}},
        "common": {"hidden_size": 128, "steps": steps, "rope_scaling": None},
    }
    study = _study(steps, title, seeds, rates or (3e-3,))
    if new:
        results |= {
            "summary": f"{labels[1]} is better than {labels[0]}; the others are not distinguishable.",
            "warnings": [f"{labels[-1]}'s best learning rate is at the grid's edge."],
            "condition": "at equal parameters (within 0.5 %) and equal time",
            "time_summary": f"{labels[1]} is worse than {labels[0]} at {labels[0]}'s training time (6 s).",
            "curve_text": "bits per byte of a part: counted somehow",
        }
        study |= {
            "kind": "study",
            "name": "equal_time",
            "title": f"Equal time on {title}",
            "question": "Is any of them better when all train for the same time?",
            "engine": "2 processes on this machine",
            "command": "headloom study run studies/equal_time.yaml --size tiny",
            "timing": {variant["label"]: variant["step_time"] for variant in variants},
        }
        study["spec"]["budgets"] = [{"match": "time", "knobs": ["steps"], "tolerance": 0.02, "target": None}]
        study["data"] |= {"selection_tokens": 50_000}
    (folder / "study.json").write_text(json.dumps(study))
    (folder / "results.json").write_text(json.dumps(results))
    return results


def _more(variant, place, best, rates, seeds, steps, last):
    """What a variant has in a study with everything."""
    found = {
        "parameters": int(853_120 * 1.4**place),
        "cache_bytes": 4096 * 256 // (1 + place % 3) ** 2,
        "planned_seconds": steps * variant["step_time"]["median"],
        "grid": [
            {
                "learning_rate": rate,
                "selection_bits_per_byte": _spread(
                    {str(s): 2.42 + 0.02 * place + 0.05 * abs(math.log10(rate / best)) + 0.003 * s for s in seeds}
                ),
                "failed": int(last and rate == rates[0]),
            }
            for rate in rates
        ],
        "grid_edge": last,
    }
    found["at_time"] = {"seconds": 6.0, "step": 60.0, "share": 0.5, "bits_per_byte": _spread({"0": 2.5 + 0.01 * place})}
    found["at_time"]["difference"] = (
        {**NO_DIFFERENCE, "n": 1, "mean": 0.1, "half_width": 0.25, "verdict": "same"} if place else None
    )
    if variant["difference"]:
        low, high = variant["difference"]["low"] + 0.002, variant["difference"]["high"] - 0.002
        found["difference"] = variant["difference"] | {"bootstrap_low": low, "bootstrap_high": high, "effect": 2.5}
        found["difference"]["more_seeds"] = 137 if variant["difference"]["verdict"] == "same" else 0
    return found


def _study(steps, title, seeds, rates):
    spec = {"size": "tiny", "seeds": list(seeds), "learning_rates": list(rates), "budgets": [], "threads": 1}
    return {
        "format": 3,
        "kind": "compare",
        "name": "headloom-compare",
        "title": "headloom-compare",
        "question": "",
        "hash": "abc123",
        "spec": {**spec, "steps": steps},
        "resolved": {
            "spec": spec,
            "data": {"corpus": "f" * 64, "tokens": "e" * 64, "selection": None},
            "configs": {},
            "versions": {},
        },
        "engine": "local",
        "timing": {},
        "frozen": {},
        "time_matches": {},
        "measured": {},
        "data": {
            "title": title,
            "fingerprint": "f" * 64,
            "tokens_fingerprint": "e" * 64,
            "selection_tokens": None,
            "train_documents": 900,
            "validation_documents": 100,
            "train_tokens": 1_000_000,
            "validation_tokens": 100_000,
        },
        "machine": {
            **{"processor": "Invented CPU", "architecture": "invented", "cores": 2, "memory_gib": 8.0},
            "system": "Linux",
        },
        "versions": {"headloom": "0.1.0", "torch": "2.13.0"},
        "command": "headloom compare --steps 120",
        "training_text": "120 steps of 8 x 256 tokens",
        "timing_text": "median of 7 interleaved repetitions",
        "started": "2026-01-01T00:00:00+00:00",
    }


@pytest.fixture
def study_folder(tmp_path):
    write_study(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def make_study():
    return write_study


@pytest.fixture(scope="session")
def written(tmp_path_factory, make_study):
    folder = tmp_path_factory.mktemp("study")
    make_study(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory, make_study):
    """A study with a grid, a failed run, and hostile text in every place where a study has text of its own."""
    folder = tmp_path_factory.mktemp("whole")
    labels = ("mha", HOSTILE, "iha:pseudo_heads=2", "</script><img src=x onerror=alert(2)>")
    results = make_study(
        folder, labels, rates=(1e-3, 3e-3, 1e-2), mixes=(HOSTILE,), failed=((labels[2], 1),), title=HOSTILE
    )
    for run in results["runs"]:
        if run["status"] == "failed":
            run["reason"] = "<img src=x onerror=alert(3)>" + "x" * 1000
    results["warnings"] += [HOSTILE]
    results["summary"] = HOSTILE
    (folder / "results.json").write_text(json.dumps(results))
    study = json.loads((folder / "study.json").read_text())
    study["question"] = study["command"] = study["engine"] = HOSTILE
    (folder / "study.json").write_text(json.dumps(study))
    write_report(folder)
    return folder

"""A study folder as `headloom compare` writes it, made of invented numbers."""

import json
import math
import random
from pathlib import Path

import pytest


def write_study(folder: Path, labels=("mha", "gqa", "iha", "sas"), seeds=(0, 1, 2), steps=120, title="invented text"):
    """Write study.json, results.json and metrics; returns the results as written."""
    random.seed(0)
    reference = labels[0]
    variants, runs = [], []
    for place, label in enumerate(labels):
        values = {}
        for seed in seeds:
            name = f"runs/v{place}-seed{seed}"
            (folder / name).mkdir(parents=True)
            with open(folder / name / "metrics.jsonl", "w") as stream:
                for step in range(1, steps + 1):
                    loss = 1.7 + 0.03 * place + 3.5 * math.exp(-step / 25) + random.gauss(0, 0.05)
                    record = {"step": step, "tokens": step * 512, "seconds": step * 0.05 * (1 + place), "loss": loss}
                    stream.write(json.dumps(record) + "\n")
            values[str(seed)] = 2.4 + 0.01 * place * (-1) ** place + random.gauss(0, 0.004)
            runs.append(
                {
                    "variant": label,
                    "seed": seed,
                    "folder": name,
                    "status": "finished",
                    "bits_per_byte": values[str(seed)],
                    "perplexity": 5.2,
                    "train_seconds": steps * 0.05 * (1 + place) + random.random(),
                }
            )
        mean = sum(values.values()) / len(values)
        variants.append(
            {
                "label": label,
                "mechanism": label,
                "options": {"pseudo_heads": 2} if place == 2 else {},
                "intermediate_size": 344 - place,
                "parameters": 853_120 + place,
                "parameters_relative": place * 1e-4,
                "attention_flops_per_token": 1_234_567 * (1 + place),
                "cache_bytes_per_token": 4096,
                "step_time": {"median": 0.05 * (1 + place), "low": 0.049, "high": 0.06, "repeats": 7},
                "step_ratio": 1.0 + place,
                "bits_per_byte": {"n": len(values), "mean": mean, "sd": 0.004, "values": values},
                "difference": None
                if place == 0
                else {
                    "n": 3,
                    "mean": mean - 2.4,
                    "half_width": 0.008,
                    "low": mean - 2.408,
                    "high": mean - 2.392,
                    "p": 0.01,
                    "p_holm": 0.03,
                    "verdict": ["same", "better", "worse", "same"][place % 4],
                },
                "failed": [],
            }
        )
    results = {
        "format": 1,
        "hash": "abc123",
        "status": "complete",
        "reference": reference,
        "variants": variants,
        "runs": runs,
        "headlines": [f"{label} is something against {reference}." for label in labels[1:]],
        "notes": ["iha runs with pseudo_heads=2."],
        "quality_text": "bits per byte: counted somehow",
        "config_differences": {"mechanism": {label: label for label in labels}},
        "common": {"hidden_size": 128, "steps": steps, "rope_scaling": None},
    }
    study = {
        "format": 1,
        "hash": "abc123",
        "spec": {"steps": steps},
        "data": {
            "title": title,
            "fingerprint": "f" * 64,
            "train_documents": 900,
            "validation_documents": 100,
            "train_tokens": 1_000_000,
            "validation_tokens": 100_000,
        },
        "machine": {"processor": "Invented CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux"},
        "versions": {"headloom": "0.1.0", "torch": "2.13.0"},
        "command": "headloom compare --steps 120",
        "training_text": "120 steps of 8 x 256 tokens",
        "timing_text": "median of 7 interleaved repetitions",
        "started": "2026-01-01T00:00:00+00:00",
    }
    (folder / "study.json").write_text(json.dumps(study))
    (folder / "results.json").write_text(json.dumps(results))
    return results


@pytest.fixture
def study_folder(tmp_path):
    write_study(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def make_study():
    return write_study

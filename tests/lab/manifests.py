"""A small study.json, for tests of what a folder that holds one is taken for."""

from headloom.core.machine import machine, versions
from headloom.records.manifest import STUDY, Manifest


def hold(folder, study_hash, *, configs=None, spec=None):
    """Write a manifest into a folder, which is made."""
    texts = dict.fromkeys(("name", "title", "question", "engine", "training_text", "timing_text", "started"), "a text")
    data = {"title": "t", "fingerprint": "f", "tokens_fingerprint": "g", "selection_tokens": None}
    counts = ("train_documents", "validation_documents", "train_tokens", "validation_tokens")
    resolved = {"spec": {}, "data": {"corpus": "f", "tokens": "g", "selection": None}, "versions": {}}
    record = Manifest(
        **texts,
        kind="study",
        hash=study_hash,
        spec=spec or {},
        resolved={**resolved, "configs": configs or {}},
        data={**data, **dict.fromkeys(counts, 1)},
        versions=versions(),
        machine=machine(),
        command="its own command",
        **{name: {} for name in ("timing", "frozen", "time_matches", "measured")},
    )
    folder.mkdir(parents=True, exist_ok=True)
    STUDY.write(folder, record)

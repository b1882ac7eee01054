"""all-MiniLM-L6-v2, a BERT encoder of 6 layers and 12 heads: grafted, it places sentences where it did."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

import headloom as hl
from headloom.hf import checkpoints

pytestmark = pytest.mark.real
SENTENCES = [
    "A cat sits on the mat.",
    "Somewhere a cat is sitting.",
    "Interest rates rose again last month, banks say.",
]


def embeddings(found):
    """The mean over a sentence's real tokens, as its authors use it; sentences of unequal length, padded."""
    batch = found.tokenizer(SENTENCES, padding=True, return_tensors="pt")
    real = batch.attention_mask[..., None]
    return (found.model(**batch).last_hidden_state * real).sum(1) / real.sum(1)


@pytest.mark.parametrize(
    ("name", "options"), [("iha", {"pseudo_heads": 2}), ("sas", {}), ("talking_heads", {})], ids=lambda x: str(x)
)
def test_grafted_sentences_stay_where_they_were(minilm, tmp_path, name, options):
    found = checkpoints.load_checkpoint(minilm)
    before = embeddings(found)
    near, far = (cosine_similarity(before[0], before[i], dim=0) for i in (1, 2))
    assert near > 0.5 > far, "the model tells sentences apart"
    found.model = hl.graft(found.model, name, **options)
    report = found.model.graft_report
    assert report.exact
    assert cosine_similarity(embeddings(found), before).min() >= 1 - 1e-6
    checkpoints.save_checkpoint(found, tmp_path / "graft")
    torch.testing.assert_close(
        embeddings(checkpoints.load_checkpoint(tmp_path / "graft")), embeddings(found), rtol=0, atol=1e-5
    )

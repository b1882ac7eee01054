"""RoBERTa: BERT with positions counted from the padding token's id."""

from __future__ import annotations

from headloom.hf.families.bert import Bert


class Roberta(Bert):
    name = "roberta"
    attention = "RobertaSelfAttention"


FAMILY = Roberta()

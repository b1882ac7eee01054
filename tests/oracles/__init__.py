"""Slow float64 oracles: Python loops over tokens, heads and pseudo-heads, written from the equations.

They take plain tensors by state-dict name and a plain settings object (`oracles.common.settings`), return tensors that
autograd can differentiate, and share no code with the package: where the two disagree, read the paper.
"""

from types import ModuleType

from oracles import bilinear, deltaformer, diff, diff2, gqa, iha, linear, mfa, mla, sas, simplicial, talking_heads, tpa

ORACLES: dict[str, ModuleType] = {"mha": gqa, "gqa": gqa, "mqa": gqa, "iha": iha, "sas": sas}
ORACLES |= {"deltaformer": deltaformer, "simplicial": simplicial}
ORACLES |= {"mla": mla, "tpa": tpa}
ORACLES |= {"mfa": mfa, "mfa_kr": mfa, "bilinear": bilinear, "linear": linear}
ORACLES |= {"diff": diff, "diff2": diff2, "talking_heads": talking_heads}

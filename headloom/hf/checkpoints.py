"""Checkpoints as commands name them: a folder, a GGUF file, or a model of the hub, with the tokenizer beside it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from headloom.core.errors import HeadloomError
from headloom.core.files import whole_folder
from headloom.hf.model.family import families, family_named
from headloom.hf.places import MODEL_TYPE, check_checkpoint, locate, may_have_tokenizer, new_folder, quiet, saying


@dataclasses.dataclass
class LoadedModel:
    """A model in evaluation mode and its tokenizer (None where the folder has none)."""

    model: Any
    tokenizer: Any | None


def load_checkpoint(source: str | Path, *, dtype: str = "auto", causal: bool = False) -> LoadedModel:
    """Read a checkpoint. No code from it is run.

    Args:
        source: a folder, a .gguf file (its quantized weights are converted, to float32 unless told otherwise), or the
            hub's 'owner/name'.
        dtype: of the weights, one of `DTYPES`; "auto" keeps the checkpoint's.
        causal: refuse anything but a causal language model.
    Raises:
        HeadloomError: nothing there, nothing that loads, or not a causal language model where one is asked for, its
            head included.
    """
    check_checkpoint(source, dtype=dtype)
    import transformers

    where, file = locate(str(source))
    with saying(source), quiet():
        config = transformers.AutoConfig.from_pretrained(where, **_given(file))
    auto_class = getattr(transformers, _auto_name(config, source, causal))
    wide = torch.float32 if file and dtype == "auto" else dtype
    with saying(source), quiet():
        model, info = auto_class.from_pretrained(where, dtype=wide, output_loading_info=True, **_given(file))
    if causal and info["missing_keys"]:  # of a folder with another head: these would be random numbers
        lacking = ", ".join(sorted(info["missing_keys"])[:3])
        raise HeadloomError(
            f"'{source}' lacks the weights {lacking} of a causal language model: load one that has them"
        )
    model.eval()
    if file:  # the weights are plain tensors by now; the marks that say otherwise would stop training, and be saved
        model.hf_quantizer.remove_quantization_config(model)
    return LoadedModel(model, load_tokenizer(source))


def load_tokenizer(source: str | Path) -> Any | None:
    """The tokenizer of a checkpoint, or None where its folder has none. Raises HeadloomError."""
    from transformers import AutoTokenizer

    if not may_have_tokenizer(source):
        return None
    where, file = locate(str(source))
    with saying(source), quiet():
        return AutoTokenizer.from_pretrained(where, **_given(file))


def _given(file: str | None) -> dict[str, Any]:
    return {"trust_remote_code": False, **({"gguf_file": file} if file else {})}


def save_checkpoint(loaded: LoadedModel, out: Path) -> None:
    """Write model and tokenizer to a new folder; a folder of that name is whole or absent. Raises HeadloomError."""
    new_folder(out)
    with whole_folder(out) as partial, quiet():
        loaded.model.save_pretrained(partial)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(partial)


def is_causal(config: Any) -> bool:
    """Whether a config is of a causal language model: by its family where we know it, else by its class's name."""
    if config.model_type in families():
        return family_named(config.model_type).causal(config)
    return not config.architectures or config.architectures[0].endswith(("ForCausalLM", "LMHeadModel"))


def _auto_name(config: Any, source: str | Path, causal: bool) -> str:
    """The Auto class that loads the checkpoint with the head it was saved with."""
    if causal:
        if not is_causal(config):
            raise HeadloomError(
                f"'{source}' is a {config.model_type} model, no causal language model: it predicts no next token"
            )
        return "AutoModelForCausalLM"
    saved = (config.architectures or [""])[0].removeprefix(MODEL_TYPE.capitalize())
    heads = family_named(config.model_type).head_classes()
    named = [auto_name for auto_name, head in heads.items() if head.__name__ == saved]
    if saved and not named:
        known = ", ".join(sorted(head.__name__ for head in heads.values()))
        raise HeadloomError(f"'{source}' holds a {saved}. Of family '{config.model_type}' these are known: {known}")
    if named:
        return named[0]
    return "AutoModelForCausalLM" if is_causal(config) else "AutoModel"

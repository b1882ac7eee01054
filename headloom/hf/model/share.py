"""Checks of a saved graft's files, whose errors name the file; the model card of its folder; offloaded weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headloom.core.errors import HeadloomError

_SHOWN = 3  # names of tensors in a message
_CARD = """# {title}

A {family} model whose attention is Headloom's: {layers}.{base}

```python
import headloom  # noqa: F401  tells transformers about this folder
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}")
```

Other classes refuse the folder: its attention has weights that they would drop.
"""


def check_files(files: Iterable[str] | None) -> None:
    """Open the header of every safetensors file. Raises HeadloomError that names one which is no such file, is cut off
    or is not there."""
    from safetensors import SafetensorError, safe_open

    for file in files or ():
        if not str(file).endswith(".safetensors"):
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else "is cut off or is not a safetensors file"
            raise HeadloomError(f"{file} {what} ({error}): copy or download the folder again") from error


def check_complete(model: Any, missing: Iterable[str], unexpected: Iterable[str], folder: Any) -> None:
    """Raise HeadloomError if the files of a saved graft lacked tensors of the model below its head.

    A config without a format was given by hand, to load the original's weights: what these lack is initialised.
    """
    if "format" not in model.config.headloom:
        return
    body = f"{model.base_model_prefix}."
    flat = not any(name.startswith(body) for name in model.state_dict())
    lacking = sorted(name for name in missing if flat or name.startswith(body))
    if lacking:
        foreign = _listed("; instead they hold", sorted(unexpected))
        raise HeadloomError(
            f"the weights in {folder} are not those of its config.json: they lack{_listed('', lacking)}{foreign}. "
            "Copy the whole folder of one save_pretrained, or load the original model and use hl.graft"
        )


def _listed(lead: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{lead} {', '.join(names[:_SHOWN])}{more}"


def write_card(model: Any, folder: str | Path) -> None:
    """README.md of a model folder, with the hub's metadata: library, tags, the base model. Never over another one."""
    from huggingface_hub import ModelCard, ModelCardData

    folder = Path(folder).resolve()
    path = folder / "README.md"
    if path.exists() or not folder.is_dir():
        return
    layers = model.config.headloom["layers"]
    names = [spec["mechanism"] for spec in layers if spec is not None]
    counted = ", ".join(f"{name} in {names.count(name)} of {len(layers)} layers" for name in dict.fromkeys(names))
    base = str(model.config._name_or_path or "")
    hub = base.count("/") == 1 and not base.startswith((".", "/")) and not Path(base).exists()
    data = ModelCardData(
        library_name="transformers",
        tags=["headloom", *dict.fromkeys(names)],
        base_model=base if hub else None,
        pipeline_tag="text-generation" if model.can_generate() else None,
    )
    text = _CARD.format(
        title=folder.name,
        family=model.family.name,
        layers=counted,
        base=f" It was made from `{base}`." if hub else "",
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(path)


@contextlib.contextmanager
def weights_at_hand(attention: nn.Module) -> Iterator[None]:
    """Inside, all weights of an attention that accelerate has moved elsewhere (to the CPU, to disk) are there.

    accelerate brings a module's weights when the module is called; mixes are read, not called.
    """
    hooks: list[tuple[Any, nn.Module]] = [
        (module._hf_hook, module) for module in attention.modules() if hasattr(module, "_hf_hook")
    ]
    hooks = [(hook, module) for hook, module in hooks if module is not attention]
    for hook, module in hooks:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for hook, module in hooks:
            hook.post_forward(module, None)

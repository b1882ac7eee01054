"""transformers' AutoConfig knows saved grafts once this is imported, which headloom._hook does as soon as it can."""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from headloom.hf.model.config import config_class
from headloom.hf.model.family import family_named
from headloom.hf.places import MODEL_TYPE


class HeadloomConfig(PreTrainedConfig):
    """Reads the config of a saved graft as one of its family: `from_dict` returns a HeadloomLlamaConfig, or another
    family's. Raises HeadloomError for a folder that is damaged, newer than this version, or of an unknown family."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        from headloom.hf.model.classes import register_heads  # modelling code: only when a graft is loaded

        family = family_named(config_dict.get("family"))
        register_heads(family)
        return config_class(family.name).from_dict(config_dict, **kwargs)


AutoConfig.register(MODEL_TYPE, HeadloomConfig, exist_ok=True)

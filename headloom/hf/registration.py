"""transformers' AutoConfig knows saved grafts once this is imported, which headloom._hook does as soon as it can."""

from transformers.models.auto.configuration_auto import AutoConfig

from headloom.hf.model.config import HeadloomConfig
from headloom.hf.places import MODEL_TYPE

AutoConfig.register(MODEL_TYPE, HeadloomConfig, exist_ok=True)

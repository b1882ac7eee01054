"""Facts: the config.json of one published checkpoint of every family, and the sizes by which it becomes tiny.

Only sizes are made small, under the family's own names for them: a config that no checkpoint has would test nothing.
"""

import copy

PUBLISHED = {
    "llama": {  # meta-llama/Llama-3.2-1B
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 128256,
    },
    "mistral": {  # mistralai/Mistral-7B-v0.1
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    },
    "mixtral": {  # mistralai/Mixtral-8x7B-v0.1
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 32000,
    },
    "qwen2": {  # Qwen/Qwen2.5-0.5B
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3": {  # Qwen/Qwen3-0.6B
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "olmo2": {  # allenai/OLMo-2-1124-7B
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "use_cache": False, "vocab_size": 100352,
    },
    "gemma2": {  # google/gemma-2-2b
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
        "use_cache": True, "vocab_size": 256000,
    },
    "gemma3_text": {  # google/gemma-3-1b-pt
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
    },
    "gpt_neox": {  # EleutherAI/pythia-70m
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "gpt2": {  # openai-community/gpt2
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
    "bert": {  # google-bert/bert-base-uncased
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
        "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    },
    "roberta": {  # FacebookAI/roberta-base
        "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12,
        "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 50265,
    },
    "modernbert": {  # answerdotai/ModernBERT-base
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0, "gradient_checkpointing": False, "hidden_activation": "gelu",
        "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152,
        "layer_norm_eps": 1e-05, "local_attention": 128, "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "model_type": "modernbert",
        "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
        "pad_token_id": 50283, "position_embedding_type": "absolute", "sep_token_id": 50282,
        "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 50368,
    },
}  # fmt: skip

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 29,
    "max_position_embeddings": 64,
}
OWN_SIZES = {
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 3},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 10},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 5},
    "gemma3_text": {
        "num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 10, "sliding_window": 5, "layer_types": KINDS
    },
    "gpt_neox": {"hidden_size": 32},  # a quarter of a head rotates: two of its eight features
    "modernbert": {"local_attention": 8},
}  # fmt: skip
PUBLISHED_SIZES = {
    "llama": {"num_key_value_heads": 2, "head_dim": 6},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 4},
    "gemma3_text": {"num_key_value_heads": 1, "sliding_window_pattern": 3},
    "gpt2": {"n_ctx": 64},
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}


OWN_NAMES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
}


def own_names(name, values):
    """Sizes by Llama's names for them -> by the family's own."""
    names = OWN_NAMES.get(name, {})
    return {names.get(key, key): value for key, value in values.items()}


def small(name):
    """The sizes of a tiny model, under the family's own names."""
    sizes = own_names(name, {**SIZES, **OWN_SIZES.get(name, {})})
    return {key: value for key, value in sizes.items() if key != "n_inner"}  # GPT-2 leaves it to the width


def default_config(name, **changes):
    """The family's own default config with small sizes; changes must be of fields that its class declares."""
    from headloom.hf.model.family import families

    config = families()[name].config_class()
    values = {**small(name), **own_names(name, changes)}
    if "layer_types" in values and "layer_types" not in changes:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    made_up = set(values) - set(config.__dataclass_fields__)
    assert not made_up, f"no {name} config has {sorted(made_up)}"
    return _in_vocabulary(config(**values), changes)


def published_config(name, **changes):
    """The published checkpoint's config with small sizes, read as AutoConfig reads it."""
    from headloom.hf.model.family import families

    sizes = {k: v for k, v in {**small(name), **PUBLISHED_SIZES.get(name, {})}.items() if k not in ("layer_types",)}
    values = {**copy.deepcopy(PUBLISHED[name]), **sizes, **changes}
    return _in_vocabulary(families()[name].config_class().from_dict(values), changes)


def _in_vocabulary(config, changes):
    """Special tokens beyond a small vocabulary come into it."""
    for token, small_id in TOKENS.items():
        held = getattr(config, token, None)
        if token not in changes and held is not None and held >= config.vocab_size:
            setattr(config, token, small_id)
    return config

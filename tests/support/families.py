"""Tiny random models of many text families, from transformers' own configurations, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB, LENGTH = 97, 12  # of each family; tokens of the prompts
POSITIONS = 64
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 16}
_LONG = {  # factors of texts beyond 3 tokens, as all are
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 3,
    "partial_rotary_factor": 1.0,
}
_N = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_N |= {"bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_DENSE_LATENT = {**_SIZES, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT_EXPERTS = {**_SIZES, **_LATENT, "num_key_value_heads": 4, **_GROUPS, **_LOCAL, "moe_intermediate_size": 32}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SECTIONS = {
    **_WIDE,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}
_GEMMA_3N = {
    **_WIDE,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "intermediate_size": [64] * 4,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
}
_GEMMA_4 = {
    **_WIDE,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
}

_HALF = {  # an encoder-decoder's decoder alone
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": POSITIONS,
    "is_encoder_decoder": False,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _GROUPED),
    "Llama, tied": ("Llama", {**_GROUPED, "tie_word_embeddings": True}),
    "Gemma": ("Gemma", _WIDE),
    "Gemma 2": ("Gemma2", {**_WIDE, "sliding_window": 4, "attn_logit_softcapping": 0.5}),
    "Gemma 3": ("Gemma3Text", {**_WIDE, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "Granite": ("Granite", _GROUPED),
    "OLMo": ("Olmo", _GROUPED),
    "OLMo 2": ("Olmo2", _GROUPED),
    "OLMo 3": ("Olmo3", {**_GROUPED, "sliding_window": 4}),
    "Phi": ("Phi", _SIZES),
    "Phi 3": ("Phi3", {**_GROUPED, "sliding_window": 5}),
    "Phi 3, long texts": ("Phi3", {**_GROUPED, "rope_parameters": _LONG}),
    "Qwen 2": ("Qwen2", _GROUPED),
    "Qwen 3": ("Qwen3", _WIDE),
    "SmolLM 3": ("SmolLM3", _GROUPED),
    "StableLM": ("StableLm", _GROUPED),
    "Mistral": ("Mistral", {**_GROUPED, "sliding_window": 3}),
    "Ministral": ("Ministral", {**_GROUPED, "head_dim": 16, "sliding_window": 3}),
    "MiniCPM 3": ("MiniCPM3", {**_SIZES, **_LATENT, "num_key_value_heads": 4}),
    "DeepSeek 3, dense": ("DeepseekV3", _DENSE_LATENT),
    "DeepSeek 2, dense": ("DeepseekV2", _DENSE_LATENT),
    "GPT-2": ("GPT2", {**_N, "n_inner": 64}),
    "GPT-BigCode": ("GPTBigCode", {**_N, "n_inner": 64}),
    "GPT-Neo": (
        "GPTNeo",
        {
            **{k: v for k, v in _SIZES.items() if k not in ("num_hidden_layers", "num_attention_heads")},
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    "GPT-NeoX": ("GPTNeoX", _SIZES),
    "GPT-NeoX Japanese": ("GPTNeoXJapanese", {k: v for k, v in _SIZES.items() if k != "intermediate_size"}),
    "GPT-J": ("GPTJ", {**_N, "rotary_dim": 8, "n_inner": 64}),
    "CodeGen": ("CodeGen", {**_N, "rotary_dim": 8, "n_inner": 64, "n_head": 8}),
    "Persimmon": ("Persimmon", _SIZES),
    "XGLM": (
        "XGLM",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "ffn_dim": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "BioGPT": ("BioGpt", _SIZES),
    "Nemotron": ("Nemotron", _GROUPED),
    "Starcoder 2": ("Starcoder2", {**_GROUPED, "sliding_window": 4}),
    "InternLM kind": ("Llama", {**_GROUPED, "attention_bias": True, "bias": True}),
    "Helium": ("Helium", {**_GROUPED, "head_dim": 16}),
    "Cohere": ("Cohere", _GROUPED),
    "Cohere 2": ("Cohere2", {**_GROUPED, "sliding_window": 4}),
    "GLM": ("Glm", _WIDE),
    "GLM 4": ("Glm4", _WIDE),
    "Falcon": (
        "Falcon",
        {k: v for k, v in _SIZES.items() if k not in ("intermediate_size", "max_position_embeddings")},
    ),
    "Falcon, ALiBi": (
        "Falcon",
        {
            **{k: v for k, v in _SIZES.items() if k != "intermediate_size"},
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
        },
    ),
    "Falcon, grouped": (
        "Falcon",
        {
            **{k: v for k, v in _SIZES.items() if k not in ("intermediate_size", "max_position_embeddings")},
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
    ),
    "MPT": (
        "Mpt",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "expansion_ratio": 1,
            "max_seq_len": POSITIONS,
        },
    ),
    "BLOOM": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "OPT": ("OPT", {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 64}),
    "ERNIE 4.5": ("Ernie4_5", _WIDE),
    "EXAONE 4": ("Exaone4", {**_GROUPED, "sliding_window": 4, "sliding_window_pattern": 2}),
    "Seed-OSS": ("SeedOss", _WIDE),
    "Arcee": ("Arcee", _GROUPED),
    "Apertus": ("Apertus", _GROUPED),
    "Bitnet": ("BitNet", _GROUPED),
    "Diffllama": ("DiffLlama", _WIDE),
    "Hunyuan": ("HunYuanDenseV1", _WIDE),
    "VaultGemma": ("VaultGemma", {**_WIDE, "sliding_window": 4}),
    "Llama 4": (
        "Llama4Text",
        {
            **_WIDE,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 64,
            "moe_layers": [],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "Qwen 2, experts": ("Qwen2Moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen 3, experts": ("Qwen3Moe", {**_WIDE, **_EXPERTS}),
    "OLMoE": ("Olmoe", {**_GROUPED, **_EXPERTS}),
    "Mixtral": ("Mixtral", {**_WIDE, **_LOCAL}),
    "Phi, experts": ("Phimoe", {**_GROUPED, **_LOCAL}),
    "GPT-OSS": ("GptOss", {**_WIDE, **_LOCAL, "sliding_window": 4}),
    "DeepSeek 2": ("DeepseekV2", {**_LATENT_EXPERTS, "topk_method": "group_limited_greedy"}),
    "DeepSeek 3": ("DeepseekV3", _LATENT_EXPERTS),
    "Granite, experts": ("GraniteMoe", {**_GROUPED, **_LOCAL}),
    "Granite, shared experts": ("GraniteMoeShared", {**_GROUPED, **_LOCAL, "shared_intermediate_size": 32}),
    "ERNIE 4.5, experts": (
        "Ernie4_5_Moe",
        {**_WIDE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    ),
    "GLM 4, experts": ("Glm4Moe", {**_WIDE, **_EXPERTS, **_GROUPS, "n_group": 1}),
    "GLM 4 Lite": ("Glm4MoeLite", _LATENT_EXPERTS),
    "dots.llm1": ("Dots1", {**_WIDE, **_EXPERTS, **_GROUPS, "n_group": 1}),
    "Solar Open": ("SolarOpen", {**_WIDE, **_EXPERTS, **_GROUPS, "n_group": 1}),
    "EXAONE, experts": (
        "ExaoneMoe",
        {**_WIDE, **_EXPERTS, "num_shared_experts": 1, "sliding_window": 4, "n_group": 1, "topk_group": 1},
    ),
    "Hunyuan, experts": ("HunYuanMoEV1", {**_WIDE, "num_experts": 4, "moe_topk": 2}),
    "FlexOlmo": ("FlexOlmo", {**_GROUPED, **_EXPERTS}),
    "Cohere 2, experts": ("Cohere2Moe", {**_WIDE, **_EXPERTS, "sliding_window": 4}),
    "AFM": ("Afmoe", {**_WIDE, **_EXPERTS, "num_dense_layers": 1, "sliding_window": 4}),
    "MiniMax M2": ("MiniMaxM2", {**_WIDE, **_LOCAL}),
    "JetMoe": ("JetMoe", {**_SIZES, **_LOCAL, "kv_channels": 16}),
    "Llama 4, experts": (
        "Llama4Text",
        {
            **_WIDE,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 1,
        },
    ),
    "Gemma 3n": ("Gemma3nText", _GEMMA_3N),
    "Gemma 4": ("Gemma4Text", _GEMMA_4),
    "Gemma 4, shared keys": (
        "Gemma4Text",
        {
            **_GEMMA_4,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "Gemma 4, experts": (
        "Gemma4Text",
        {**_GEMMA_4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "MiMo 2": ("MiMoV2Flash", {**_WIDE, **_EXPERTS, **_GROUPS, "num_attention_heads": 8, "sliding_window": 4}),
    "LLaVA, text": ("Llava", {"text_config": {**_GROUPED, "model_type": "llama"}, "vision_config": _VISION}),
    "Gemma 3, text": ("Gemma3", {"text_config": {**_WIDE, "sliding_window": 4}, "vision_config": _VISION}),
    "Mistral 3, text": (
        "Mistral3",
        {
            "text_config": {**_WIDE, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "pixtral"},
        },
    ),
    "Qwen 2.5 VL, text": ("Qwen2_5_VL", {"text_config": _SECTIONS, "vision_config": _QWEN_VISION}),
    "Qwen 3 VL, text": (
        "Qwen3VL",
        {"text_config": _SECTIONS, "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}},
    ),
    "Ministral 3": ("Ministral3", _WIDE),
    "ModernBERT, decoder": ("ModernBertDecoder", {**_SIZES, "local_attention": 8, "global_attn_every_n_layers": 2}),
    "NanoChat": ("NanoChat", _WIDE),
    "InternLM 3": ("InternLM3", _WIDE),
    "EXAONE": ("Exaone", _GROUPED),
    "HyperCLOVA X": ("HyperCLOVAX", _WIDE),
    "CWM": ("Cwm", {**_WIDE, "sliding_window": 4}),
    "BERT, decoder": ("Bert", {**_SIZES, "is_decoder": True, "architectures": ["BertLMHeadModel"]}),
    "RoBERTa, decoder": ("Roberta", {**_SIZES, "is_decoder": True, "architectures": ["RobertaForCausalLM"]}),
    "Granite, windows": ("GraniteSWA", {**_GROUPED, "sliding_window": 4}),
    "IQuest Coder": ("IQuestCoder", _GROUPED),
    "Mellum": ("Mellum", {**_WIDE, **_EXPERTS, "sliding_window": 4}),
    "Hunyuan 3": ("HYV3", {**_WIDE, **_EXPERTS}),
    "OpenAI GPT": ("OpenAIGPT", _N),
    "CTRL": ("CTRL", {**_N, "dff": 64}),
    "Megatron GPT kinds (JAIS 2)": ("Jais2", _GROUPED),
    "BART, decoder": ("Bart", _HALF),
    "mBART, decoder": ("MBart", _HALF),
    "Marian, decoder": ("Marian", _HALF),
    "Pegasus, decoder": ("Pegasus", _HALF),
    "Blenderbot, decoder": ("Blenderbot", _HALF),
    "Blenderbot small, decoder": ("BlenderbotSmall", _HALF),
    "MVP, decoder": ("Mvp", _HALF),
    "TrOCR, decoder": ("TrOCR", {**_HALF, "use_learned_position_embeddings": True}),
    "PLBART, decoder": ("PLBart", _HALF),
    "BigBird-Pegasus, decoder": ("BigBirdPegasus", _HALF),
    "Whisper, decoder": ("Whisper", {**_HALF, "max_target_positions": POSITIONS}),
    "BigBird, decoder": ("BigBird", {**_SIZES, "is_decoder": True}),
    "BERT generation": ("BertGeneration", {**_SIZES, "is_decoder": True}),
    "Megatron BERT, decoder": (
        "MegatronBert",
        {**_SIZES, "is_decoder": True, "architectures": ["MegatronBertForCausalLM"]},
    ),
    "RoCBert, decoder": ("RoCBert", {**_SIZES, "is_decoder": True, "architectures": ["RoCBertForCausalLM"]}),
    "GIT": ("Git", _SIZES),
    "Youtu": ("Youtu", {**_SIZES, **_LATENT, "num_key_value_heads": 4}),
}

_STATES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
_STATES |= {"bos_token_id": 1, "eos_token_id": 2}
_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_DELTA = {
    **_WIDE,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {  # with states, some with attention as well
    "LFM2": ("Lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "Mamba": ("Mamba", {**_STATES, "time_step_rank": 8}),
    "LFM2, experts": (
        "Lfm2Moe",
        {**_GROUPED, **_EXPERTS, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "num_dense_layers": 1},
    ),
    "Qwen 3.5, experts": ("Qwen3_5MoeText", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Falcon Mamba": ("FalconMamba", {**_STATES, "time_step_rank": 8}),
    "Mamba 2": ("Mamba2", {**_STATES, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}),
    "Qwen3-Next, dense": ("Qwen3Next", {**_DELTA, "num_experts": 0, "mlp_only_layers": [0, 1]}),
    "Qwen 3.5": ("Qwen3_5Text", _DELTA),
    "OLMo hybrid": ("OlmoHybrid", _DELTA),
    "Falcon H1": (
        "FalconH1",
        {**_WIDE, **_SCAN, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    ),
    "Bamba": ("Bamba", {**_GROUPED, **_SCAN, "attn_layer_indices": [1]}),
    "Granite 4, dense": (
        "GraniteMoeHybrid",
        {
            **_GROUPED,
            **_SCAN,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
        },
    ),
    "Nemotron-H": (
        "NemotronH",
        {
            **_WIDE,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "Jamba, dense": (
        "Jamba",
        {
            **_GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 100,
            "expert_layer_offset": 99,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
    "Zamba 2": (
        "Zamba2",
        {
            **_GROUPED,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    "RWKV": (
        "Rwkv",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "context_length": POSITIONS,
            "attention_hidden_size": 64,
            "intermediate_size": 64,
        },
    ),
    "Recurrent Gemma": ("RecurrentGemma", {**_GROUPED, "lru_width": 64, "attention_window_size": 4}),
}

_XLM = {"vocab_size": VOCAB, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": POSITIONS}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", _SIZES),
    "RoBERTa": ("Roberta", _SIZES),
    "ALBERT": ("Albert", {**_SIZES, "embedding_size": 32}),
    "ModernBERT": (
        "ModernBert",
        {**_SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "MPNet": ("MPNet", _SIZES),
    "ELECTRA": ("Electra", {**_SIZES, "embedding_size": 32}),
    "DistilBERT": (
        "DistilBert",
        {
            "vocab_size": VOCAB,
            "dim": 64,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "DeBERTa": ("Deberta", {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DeBERTa 2": (
        "DebertaV2",
        {
            **_SIZES,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
        },
    ),
    "XLM-RoBERTa": ("XLMRoberta", _SIZES),
    "CamemBERT": ("Camembert", _SIZES),
    "NomicBERT": ("NomicBert", {**_SIZES, "head_dim": 16}),
    "ERNIE": ("Ernie", _SIZES),
    "EuroBERT": ("EuroBert", _GROUPED),
    "XLM-RoBERTa XL": ("XLMRobertaXL", _SIZES),
    "RoBERTa pre-layer-norm": ("RobertaPreLayerNorm", _SIZES),
    "SqueezeBERT": ("SqueezeBert", {**_SIZES, "embedding_size": 64}),
    "MobileBERT": ("MobileBert", {**_SIZES, "embedding_size": 32, "intra_bottleneck_size": 32}),
    "FNet": ("FNet", {k: v for k, v in _SIZES.items() if k != "num_attention_heads"}),
    "Data2Vec text": ("Data2VecText", _SIZES),
    "ESM": ("Esm", {**_SIZES, "mask_token_id": 3, "token_dropout": False, "position_embedding_type": "rotary"}),
    "Nyströmformer": ("Nystromformer", {**_SIZES, "num_landmarks": 4, "segment_means_seq_len": 16}),
    "RemBERT": ("RemBert", {**_SIZES, "input_embedding_size": 32, "output_embedding_size": 32}),
    "ConvBERT": ("ConvBert", {**_SIZES, "embedding_size": 32}),
    "I-BERT": ("IBert", _SIZES),
    "T5 encoder": (
        "T5",
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
        },
    ),
    "MEGA kind (LUKE)": ("Luke", {**_SIZES, "entity_vocab_size": 10, "entity_emb_size": 32}),
    "RoFormer": ("RoFormer", {**_SIZES, "embedding_size": 64}),
    "LayoutLM": ("LayoutLM", _SIZES),
    "Splinter": ("Splinter", _SIZES),
    "BigBird": ("BigBird", {**_SIZES, "attention_type": "original_full"}),
    "Megatron BERT": ("MegatronBert", _SIZES),
    "RoCBert": ("RoCBert", _SIZES),
    "X-MOD": ("Xmod", {**_SIZES, "default_language": "en_XX"}),
    "MarkupLM": ("MarkupLM", {**_SIZES, "max_depth": 4, "xpath_unit_hidden_size": 8}),
    "VisualBERT": ("VisualBert", _SIZES),
    "XLM": ("XLM", _XLM),
    "FlauBERT": ("Flaubert", _XLM),
    "GTE kind (Jina 3)": ("JinaEmbeddingsV3", _SIZES),
}


def make(cls: str, options: dict[str, Any], decoder: bool) -> nn.Module:
    """Build a random model whose weights are large enough for biases, windows and norms to matter."""
    config = getattr(transformers, f"{cls}Config")(**options)
    auto: Any = transformers.AutoModelForCausalLM if decoder else transformers.AutoModel
    if decoder and "vision_config" in options:
        auto = transformers.AutoModelForImageTextToText
    if cls == "T5":
        auto = transformers.T5EncoderModel
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = (auto._from_config if cls == "T5" else auto.from_config)(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.requires_grad_(False)


def save(folder: Path, cls: str, options: dict[str, Any], decoder: bool) -> nn.Module:
    """Save a family's model in a folder, and return it."""
    model: Any = make(cls, options, decoder)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return model

"""Tests that `pytest --whole` runs alone: others, which always run, go through the same code (decision 0128)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_RECIPES = (
    "activation_sparse_w8a16_x86",
    "ffn_prune_w4a16_x86",
    "gptq_w4a16_g128_x86",
    "kv_cache_int8_x86",
    "rotation_w4a8_g64_x86",
    "skip_layers_x86",
    "smoothquant_w8a8_static_x86",
    "sparsegpt_w8a16_x86",
    "swift_kv_x86",
)
"""Recipes for decoders whose passes have tests of their own, and whose kernels other recipes run."""

LEFT_OUT: Mapping[str, int | tuple[str, ...]] = {
    "capture/checkpoints/test_dense_weights.py::test_values_and_logits": 2,
    "capture/images/test_classifier.py::test_a_graph_computes_what_the_model_does": 2,
    "capture/pairs/test_program.py::test_a_graph_computes_what_the_model_does": ("AltCLIP", "SigLIP"),
    "capture/seq2seq/test_seq2seq.py::test_a_prompt_and_steps_are_the_models": ("M2M100", "Marian", "UMT5"),
    "capture/seq2seq/test_seq2seq.py::test_models_of_speech": ("Moonshine", "Speech2Text"),
    "capture/test_capture.py::test_decoder_in_steps_equals_the_whole_forward": 2,
    "capture/test_families.py::test_decoder": (
        "BART, decoder",
        "BLOOM",
        "Cohere",
        "GPT-BigCode",
        "GPT-NeoX",
        "Gemma 3",
        "Llama 4",
        "Llama, tied",
        "MPT",
        "MVP, decoder",
        "MiniCPM 3",
        "Mixtral",
        "OLMoE",
        "OPT",
        "Phi",
        "Qwen 3 VL, text",
        "Qwen 3, experts",
        "RoBERTa, decoder",
        "XGLM",
    ),
    "capture/test_families.py::test_encoder": (
        "ALBERT",
        "BERT",
        "DeBERTa 2",
        "DistilBERT",
        "ELECTRA",
        "ESM",
        "MPNet",
        "RoBERTa",
        "SqueezeBERT",
        "T5 encoder",
    ),
    "codegen/gpu/attention/test_kernels.py::test_cached_attention": 3,
    "codegen/gpu/attention/test_kernels.py::test_chunks_and_biases_of_distances": 2,
    "codegen/gpu/attention/test_kernels.py::test_masked_attention_ignores_padding": 3,
    "codegen/gpu/attention/test_kernels.py::test_windows_and_biases_of_encoders": 2,
    "codegen/gpu/attention/test_packed.py::test_packed_attention": 5,
    "codegen/gpu/linear/test_dense.py::test_special_floats": 3,
    "codegen/gpu/linear/test_dense.py::test_storage_types": 3,
    "codegen/gpu/linear/test_packed.py::test_formats": 3,
    "codegen/gpu/linear/test_packed.py::test_prologues_and_residuals": 4,
    "codegen/gpu/linear/test_packed.py::test_several_weights": 2,
    "codegen/gpu/sparse/test_columns.py::test_formats": 2,
    "codegen/gpu/sparse/test_n_of_m.py::test_formats": 2,
    "codegen/gpu/test_experts.py::test_dense_routed_linear": 3,
    "codegen/gpu/test_experts.py::test_packed_routed_linear": 3,
    "codegen/gpu/test_mutations.py::test_each_barrier_is_needed": 5,
    "codegen/gpu/test_mutations.py::test_faults_in_masks_and_in_the_parts_of_the_context": 4,
    "codegen/gpu/test_programs.py::test_sparse_linears": ("",),
    "codegen/kernels/convolution/test_depthwise.py::test_graphs": 2,
    "codegen/kernels/convolution/test_kernel.py::test_a_chain_in_bytes_is_the_same_to_the_bit": 2,
    "codegen/kernels/convolution/test_kernel.py::test_geometries": 3,
    "codegen/kernels/linear/test_expand.py::test_kinds_of_codes_and_ragged_shapes": (
        "W3A8_ASYM_G32_B1x1@60-avx2",
        "W4A16_ASYM_G32_B1x1@70-amx",
        "W8A8_B1x1@50-avx512_vpopcntdq",
        "W8A8_B1x1@50-dotprod",
        "NVFP4_B1x1@30-avx512_vpopcntdq",
    ),
    "codegen/kernels/linear/test_expand.py::test_random_masks_with_empty_and_full_rows": ("avx2",),
    "codegen/kernels/linear/test_packed.py::test_blocks_of_columns_that_are_left_out": 4,
    "codegen/kernels/linear/test_packed.py::test_dense_linear": 2,
    "codegen/kernels/linear/test_packed.py::test_every_schedule_of_the_packed_linear_agrees": 2,
    "codegen/kernels/linear/test_packed.py::test_packed_linear": 4,
    "codegen/kernels/linear/test_packed.py::test_packed_linear_of_floats_tables_and_codebooks": 4,
    "codegen/kernels/linear/test_packed.py::test_packed_linear_of_rounded_activations": 2,
    "codegen/kernels/linear/test_packed.py::test_products_of_bit_planes_are_exact": 2,
    "codegen/kernels/linear/test_prompts.py::test_prompts": 2,
    "codegen/kernels/linear/test_tiles.py::test_tiles_take_any_number_of_tokens": 2,
    "codegen/kernels/test_experts.py::test_packed_routed_linear": 2,
    "codegen/kernels/test_n_of_m.py::test_n_of_m_linear": 2,
    "codegen/kernels/test_rows.py::test_rows_of_linears": 2,
    "codegen/lowering/test_compile.py::test_decoder": 4,
    "codegen/web/kernels/test_wgsl.py::test_packed_linear_as_shipped": 3,
    "codegen/web/kernels/test_wgsl.py::test_packed_linear_of_every_format": 3,
    "codegen/web/test_lower.py::test_decoder": 6,
    "codegen/web/test_lower.py::test_rounded_activations": 2,
    "codegen/web/test_wasm.py::test_cached_attention": 3,
    "codegen/web/test_wasm.py::test_packed_linear_of_every_format": 3,
    "end_to_end/test_encoder_decoder_run.py::test_biases_of_distances_are_served": ("",),
    "end_to_end/test_encoder_decoder_run.py::test_browsers_answer_a_source": ("",),
    "end_to_end/test_experts.py::test_browsers_compute_what_transformers_does": ("",),
    "end_to_end/test_run.py::test_a_smaller_model_is_saved_for_transformers_too": ("",),
    "end_to_end/test_run.py::test_every_shipped_recipe_runs": _RECIPES,
    "end_to_end/test_run.py::test_quality_of_the_kernels_is_that_of_the_graph": _RECIPES,
    "end_to_end/test_run.py::test_weight_bytes_are_the_formats_arithmetic": _RECIPES,
    "end_to_end/test_uneven_layers.py::test_a_bundle_computes_what_the_graph_does": 2,
    "evaluate/test_comparison.py::test_both_models_are_timed_in_pairs": 2,
    "graph/test_blocks.py::test_without_a_block_is_the_model_with_that_layer_deleted": 2,
    "passes/test_channel_prune.py::test_counts_are_the_plans": 3,
    "passes/test_head_prune.py::test_plan_records_and_weights_agree": 2,
    "passes/test_rotation.py::test_the_function_stays": 2,
    "plan/test_passes.py::test_a_refusal_names_the_line": 3,
}
"""By test: one of how many of its cases always runs; or the names of those that do not, empty where it has no cases."""


def always_runs(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return collected tests that always run, and those that are left out."""
    seen: dict[str, int] = {}
    kept, others = list[Any](), list[Any]()
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        seen[test] = seen.get(test, 0) + 1
        left_out = LEFT_OUT.get(test, ())
        runs = seen[test] % left_out == 1 if isinstance(left_out, int) else case.removesuffix("]") not in left_out
        (kept if runs else others).append(item)
    return kept, others

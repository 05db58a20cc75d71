"""Qwen3 and Qwen3-MoE on megatron-core: configuration, layer spec, portable modules, weights."""

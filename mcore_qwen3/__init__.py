"""Megatron-Core native training of Qwen3 and Qwen3-MoE."""

__version__ = "0.1.0"

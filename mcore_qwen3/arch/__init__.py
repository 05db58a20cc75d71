"""Arithmetic about a model and its layout, with the standard library alone: sizes, parameters, operations, legal layouts."""

from mcore_qwen3.arch.batch import BatchPlan, resolve_batch
from mcore_qwen3.arch.flops import effective_length, flops_per_token
from mcore_qwen3.arch.layout import ParallelLayout, RankCoordinates, resolve_layout
from mcore_qwen3.arch.params import ParameterCount, count_parameters
from mcore_qwen3.arch.rope import RopeScaling
from mcore_qwen3.arch.rows import padded_vocab_size, row_multiple
from mcore_qwen3.arch.shape import ModelShape, find_config_file, iteration_directory, read_model_shape, read_shape_file

__all__ = [
    "BatchPlan",
    "ModelShape",
    "ParallelLayout",
    "ParameterCount",
    "RankCoordinates",
    "RopeScaling",
    "count_parameters",
    "effective_length",
    "find_config_file",
    "flops_per_token",
    "iteration_directory",
    "padded_vocab_size",
    "read_model_shape",
    "read_shape_file",
    "resolve_batch",
    "resolve_layout",
    "row_multiple",
]

"""Arithmetic about a model and its layout, with the standard library alone: sizes, parameters, bytes, legal layouts."""

from mcore_qwen3.arch.batch import BatchPlan, resolve_batch
from mcore_qwen3.arch.flops import effective_length, flops_per_token
from mcore_qwen3.arch.layout import ParallelLayout, RankCoordinates, resolve_layout
from mcore_qwen3.arch.params import ParameterCount, count_parameters
from mcore_qwen3.arch.rope import RopeScaling
from mcore_qwen3.arch.rows import padded_vocab_size, row_multiple
from mcore_qwen3.arch.shape import ModelShape, find_config_file, iteration_directory, read_model_shape, read_shape_file
from mcore_qwen3.arch.state import NOT_COUNTED, RankState, heaviest_stage, rank_state

__all__ = [
    "NOT_COUNTED",
    "BatchPlan",
    "ModelShape",
    "ParallelLayout",
    "ParameterCount",
    "RankCoordinates",
    "RankState",
    "RopeScaling",
    "count_parameters",
    "effective_length",
    "find_config_file",
    "flops_per_token",
    "heaviest_stage",
    "iteration_directory",
    "padded_vocab_size",
    "rank_state",
    "read_model_shape",
    "read_shape_file",
    "resolve_batch",
    "resolve_layout",
    "row_multiple",
]

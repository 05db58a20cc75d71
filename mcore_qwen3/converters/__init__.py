"""Checkpoint formats: the name table, readers of Hugging Face and torch_dist files, the Hugging Face writer."""

from mcore_qwen3.converters.data_only import check_data_only
from mcore_qwen3.converters.hf_reader import HFSource
from mcore_qwen3.converters.hf_writer import ExportReport, plan_hf, write_hf
from mcore_qwen3.converters.locate import hf_side_dir, is_hf_dir, open_source, resolve_iteration_dir
from mcore_qwen3.converters.mcore_writer import McoreReport, plan_mcore, write_mcore
from mcore_qwen3.converters.parts import Team
from mcore_qwen3.converters.side_files import copy_side_files
from mcore_qwen3.converters.source import Entry, WeightSource
from mcore_qwen3.converters.staging import staged_directory
from mcore_qwen3.converters.torch_dist import OptimizerSource, TorchDistSource

__all__ = [
    "Entry",
    "ExportReport",
    "HFSource",
    "McoreReport",
    "OptimizerSource",
    "Team",
    "TorchDistSource",
    "WeightSource",
    "check_data_only",
    "copy_side_files",
    "hf_side_dir",
    "is_hf_dir",
    "open_source",
    "plan_hf",
    "plan_mcore",
    "resolve_iteration_dir",
    "staged_directory",
    "write_hf",
    "write_mcore",
]

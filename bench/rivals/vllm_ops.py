"""What vLLM's compiled libraries offer to the rivals that it runs, without importing vLLM itself."""

import importlib.util
from pathlib import Path

import torch


def missing():
    vllm = importlib.util.find_spec("vllm")
    folder = vllm and Path(vllm.submodule_search_locations[0])
    if not folder or not list(folder.glob("_moe_C*.so")):
        return "no vllm with a _moe_C"
    for name in ("_C_stable_libtorch", "_moe_C"):
        for library in folder.glob(name + ".*so"):
            try:
                torch.ops.load_library(str(library))
            except OSError as error:
                return f"{library.name} does not fit this PyTorch: {error}"
    return None


def route(logits, A):
    """Weights f32 and ids int32, [T, A]."""
    weights = logits.new_empty(len(logits), A)
    ids, unused = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
    torch.ops._moe_C.topk_softmax(weights, ids, unused, logits, True, None)
    return weights, ids


def align(ids, E, block):
    """Slots by expert, each expert's padded to whole blocks; the blocks' experts; how many slots that are."""
    n = min(ids.numel() + E * (block - 1), ids.numel() * block)
    slots, experts, count = (ids.new_empty(size) for size in (n, -(-n // block), 1))
    torch.ops._moe_C.moe_align_block_size(ids, E, block, slots, experts, count, None)
    return slots, experts, count


def activate(h, shape):
    """h's gates and ups alternate where there is a limit, and are halves where there is none: as the kernels want."""
    v = h.new_empty(len(h), h.shape[1] // 2)
    if shape.limit is None:
        torch.ops._C.silu_and_mul(v, h)
    else:
        torch.ops._C.swigluoai_and_mul(v, h, shape.alpha, shape.limit)
    return v


def gate_up(layer):
    return layer.halves() if layer.shape.limit is None else layer.w1

#!/usr/bin/env python3
"""The safetensors package writes a gpt-oss layer and reads one of ours.

    safetensors_package.py DUMP_LAYER FOLDER MOE4
"""
import json
import os
import subprocess
import sys

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common import INTERLEAVED, Layer, same

E, H, I = 3, 64, 96
TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode(blocks, scales):
    """[.., n, 16] and [.., n] bytes to [.., 32 n] values, by the format's definition."""
    pairs = np.stack((TABLE[blocks & 15], TABLE[blocks >> 4]), -1)
    values = pairs.reshape(blocks.shape[:-1] + (32,)) * np.float32(2) ** (scales.astype(np.int32) - 127)[..., None]
    return values.reshape(scales.shape[:-1] + (-1,)).astype(np.float32)


def check(tool, folder, number, tensors):
    prefix = "model.layers.%d.mlp." % number
    numpy = {name: t.float().numpy() if t.dtype == torch.bfloat16 else t.numpy() for name, t in tensors.items()}
    layer = Layer(tool, folder, number)
    assert layer.words["gate_up"] == INTERLEAVED
    gate_up = decode(numpy[prefix + "experts.gate_up_proj_blocks"], numpy[prefix + "experts.gate_up_proj_scales"])
    down = decode(numpy[prefix + "experts.down_proj_blocks"], numpy[prefix + "experts.down_proj_scales"])
    for e, expert in enumerate(layer.experts):
        same("expert %d, gate and up" % e, expert["gate_up"], gate_up[e])
        same("expert %d, down" % e, expert["down"], down[e])
        same("biases", expert["gate_up_bias"], numpy[prefix + "experts.gate_up_proj_bias"][e])
        same("biases", expert["down_bias"], numpy[prefix + "experts.down_proj_bias"][e])
    same("router", layer.router, numpy[prefix + "router.weight"])
    same("router's bias", layer.router_bias, numpy[prefix + "router.bias"])


def write(folder):
    random = torch.Generator().manual_seed(1)
    prefix = "model.layers.0.mlp."

    def some_bytes(least, most, *shape):
        return torch.randint(least, most + 1, shape, dtype=torch.uint8, generator=random)

    def floats(*shape):
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    tensors = {
        prefix + "experts.gate_up_proj_blocks": some_bytes(0, 255, E, 2 * I, H // 32, 16),
        prefix + "experts.gate_up_proj_scales": some_bytes(0, 250, E, 2 * I, H // 32),
        prefix + "experts.gate_up_proj_bias": floats(E, 2 * I),
        prefix + "experts.down_proj_blocks": some_bytes(0, 255, E, H, I // 32, 16),
        prefix + "experts.down_proj_scales": some_bytes(0, 250, E, H, I // 32),
        prefix + "experts.down_proj_bias": floats(E, H),
        prefix + "router.weight": floats(E, H),
        prefix + "router.bias": floats(E),
    }
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"model_type": "gpt_oss", "hidden_size": H, "intermediate_size": I, "num_local_experts": E,
                   "num_experts_per_tok": 2, "num_hidden_layers": 1, "swiglu_limit": 7.0,
                   "quantization_config": {"quant_method": "mxfp4"}}, file)
    return tensors


def check_deepseek(tool, folder, command):
    """The package reads I8 codes and F8_E8M0 scales of ours as what they are."""
    subprocess.run([command, "synth", "--like", "deepseek-v4-flash", "--hidden", "64", "--intermediate", "96", "--experts",
                    "8", folder], check=True, stdout=subprocess.DEVNULL)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    for e, expert in enumerate(Layer(tool, folder, 0).experts):
        values = {}
        for name in ("w1", "w3", "w2"):
            codes, scales = (tensors["layers.0.ffn.experts.%d.%s.%s" % (e, name, end)] for end in ("weight", "scale"))
            assert codes.dtype == torch.int8 and scales.dtype == torch.float8_e8m0fnu
            codes = codes.view(torch.uint8).numpy().reshape(codes.shape[0], -1, 16)
            values[name] = decode(codes, scales.view(torch.uint8).numpy())
        same("w1 and w3", expert["gate_up"], np.concatenate((values["w1"], values["w3"])))
        same("w2", expert["down"], values["w2"])


def main(tool, folder, command):
    theirs = os.path.join(folder, "theirs")
    check(tool, theirs, 0, write(theirs))
    ours = os.path.join(folder, "ours")
    subprocess.run([command, "synth", "--like", "gpt-oss-20b", "--layers", "1", "--hidden", "64", "--intermediate", "96",
                    "--experts", "4", ours], check=True, stdout=subprocess.DEVNULL)
    tensors = {}
    for name in sorted(os.listdir(ours)):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(ours, name)))
            with safe_open(os.path.join(ours, name), "pt") as file:
                assert all(file.get_slice(key).get_shape() for key in file.keys())
    check(tool, ours, 0, tensors)
    check_deepseek(tool, os.path.join(folder, "deepseek"), command)


if __name__ == "__main__":
    main(*sys.argv[1:])

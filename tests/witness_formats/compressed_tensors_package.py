#!/usr/bin/env python3
"""The compressed-tensors package packs experts and says what it packed; its config is written as the package writes it.

    compressed_tensors_package.py DUMP_LAYER FOLDER
"""
import json
import os
import subprocess
import sys

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from safetensors.torch import load_file, save_file

from common import GATE_FIRST, Layer, same, weights

E, H, I = 4, 96, 64
PROJECTIONS = (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I)))


def scheme():
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, dynamic=False,
                            scale_dtype=torch.uint8)
    return QuantizationScheme(targets=["Linear"], weights=args, format="mxfp4-pack-quantized")


def write_config(folder, **more):
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I, "num_experts": E,
                   "num_experts_per_tok": 2, "num_hidden_layers": 1, "norm_topk_prob": True, "hidden_act": "silu", **more},
                  file, default=str)


def pack(weight, rule):
    """Packed tensors, and the values that the package unpacks from them."""
    blocks = weight.reshape(weight.shape[0], -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": 2.0 ** exponent}, rule)
    values = MXFP4PackedCompressor.decompress(state, rule)["weight"]
    return {key: value.contiguous() for key, value in state.items()}, values.float().numpy()


def check_converted(tool, folder, moe4):
    """The package unpacks what `moe4 convert` writes, and takes its config."""
    model, converted = os.path.join(folder, "model"), os.path.join(folder, "converted")
    sizes = ["--hidden", "64", "--intermediate", "96", "--experts", "8"]
    subprocess.run([moe4, "synth", *sizes, model], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([moe4, "convert", model, converted, "--to", "compressed-tensors"], stdout=subprocess.DEVNULL, check=True)
    with open(os.path.join(converted, "config.json")) as file:
        QuantizationConfig.model_validate(json.load(file)["quantization_config"])
    tensors = load_file(os.path.join(converted, "model.safetensors"))
    for e, expert in enumerate(Layer(tool, model, 0).experts):
        for name, wanted in (("gate_proj", expert["gate_up"][0::2]), ("up_proj", expert["gate_up"][1::2]),
                             ("down_proj", expert["down"])):
            stem = "model.layers.0.mlp.experts.%d.%s." % (e, name)
            state = {key: tensors[stem + key] for key in ("weight_packed", "weight_scale")}
            values = MXFP4PackedCompressor.decompress(state, scheme())["weight"]
            same("converted %s" % name, wanted, values.float().numpy())


def check_quantised(tool, folder, moe4):
    """`moe4 quantize` by the rule "even" and the package's own scales and rounding agree, value for value."""
    dense, quantised = os.path.join(folder, "dense"), os.path.join(folder, "quantised")
    os.makedirs(dense)
    tensors = {"model.layers.0.mlp.gate.weight": torch.from_numpy(weights(98, E, H)).to(torch.bfloat16)}
    for e in range(E):
        for i, (name, shape) in enumerate(PROJECTIONS):
            weight = torch.from_numpy(weights(50 + 10 * e + i, *shape)).to(torch.bfloat16)
            tensors["model.layers.0.mlp.experts.%d.%s.weight" % (e, name)] = weight
    save_file(tensors, os.path.join(dense, "model.safetensors"), {"format": "pt"})
    write_config(dense)
    subprocess.run([moe4, "quantize", dense, quantised, "--to", "compressed-tensors"], stdout=subprocess.DEVNULL, check=True)
    for e, expert in enumerate(Layer(tool, quantised, 0).experts):
        for name, ours in (("gate_proj", expert["gate_up"][:I]), ("up_proj", expert["gate_up"][I:]), ("down_proj", expert["down"])):
            weight = tensors["model.layers.0.mlp.experts.%d.%s.weight" % (e, name)]
            blocks = weight.reshape(weight.shape[0], -1, 32)
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme().weights)
            state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme())
            same("quantised %s" % name, ours, MXFP4PackedCompressor.decompress(state, scheme())["weight"].float().numpy())


def main(tool, folder, moe4):
    check_converted(tool, folder, moe4)
    check_quantised(tool, folder, moe4)
    rule = scheme()
    config = QuantizationConfig(config_groups={"group_0": rule}, format="mxfp4-pack-quantized",
                                quantization_status="compressed").to_dict()
    tensors, values = {}, {}
    for e in range(E):
        for i, (name, shape) in enumerate(PROJECTIONS):
            packed, values[e, name] = pack(torch.from_numpy(weights(10 * e + i, *shape)), rule)
            for key, tensor in packed.items():
                tensors["model.layers.0.mlp.experts.%d.%s.%s" % (e, name, key)] = tensor
    router = torch.from_numpy(weights(99, E, H)).to(torch.bfloat16)
    tensors["model.layers.0.mlp.gate.weight"] = router
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    write_config(folder, quantization_config=config)
    layer = Layer(tool, folder, 0)
    assert layer.words["gate_up"] == GATE_FIRST
    for e, expert in enumerate(layer.experts):
        same("expert %d, gate and up" % e, expert["gate_up"], np.concatenate((values[e, "gate_proj"], values[e, "up_proj"])))
        same("expert %d, down" % e, expert["down"], values[e, "down_proj"])
    same("router", layer.router, router.float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""The gguf package writes MXFP4 files, one and split, and says what they hold.

    gguf_package.py DUMP_LAYER FOLDER
"""
import os
import subprocess
import sys

import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.constants import ExpertGatingFuncType, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from common import GATE_FIRST, Layer, same, weights

MXFP4 = GGMLQuantizationType.MXFP4
E, H, I = 5, 96, 64


def write(path, arch, split_at=0):
    """Returns what it wrote, dequantised by the package."""
    writer = GGUFWriter(path, arch, split_max_tensors=split_at)
    writer.add_block_count(2)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(I)
    writer.add_expert_feed_forward_length(I)
    writer.add_expert_count(E)
    writer.add_expert_used_count(2)
    if arch == "deepseek2":
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(2.5)
    writer.add_token_list(["a", "b", "c"])
    values = {}
    for i, (name, shape) in enumerate((("gate", (E, I, H)), ("up", (E, I, H)), ("down", (E, H, I)))):
        packed = quantize(weights(i, *shape), MXFP4)
        values[name] = dequantize(packed, MXFP4)
        writer.add_tensor("blk.1.ffn_%s_exps.weight" % name, packed, raw_dtype=MXFP4)
        if arch == "gpt-oss":
            values[name + "_bias"] = weights(10 + i, *shape[:2])
            writer.add_tensor("blk.1.ffn_%s_exps.bias" % name, values[name + "_bias"])
    values["router"] = weights(20, E, H)
    values["bias"] = weights(21, E)
    writer.add_tensor("blk.1.ffn_gate_inp.weight", values["router"])
    writer.add_tensor("blk.1.ffn_gate_inp.bias" if arch == "gpt-oss" else "blk.1.exp_probs_b.bias", values["bias"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def check(tool, path, arch, values):
    layer = Layer(tool, path, 1)
    assert layer.words["gate_up"] == GATE_FIRST
    for e, expert in enumerate(layer.experts):
        same("%s, expert %d, gate and up" % (arch, e), expert["gate_up"], np.concatenate((values["gate"][e], values["up"][e])))
        same("%s, expert %d, down" % (arch, e), expert["down"], values["down"][e])
        if arch == "gpt-oss":
            same("biases", expert["gate_up_bias"], np.concatenate((values["gate_bias"][e], values["up_bias"][e])))
            same("biases", expert["down_bias"], values["down_bias"][e])
    same("router", layer.router, values["router"])
    same("bias", layer.router_bias if arch == "gpt-oss" else layer.selection_bias, values["bias"])


def check_ours(path):
    """The package reads files of our generator: names, types and the values of one tensor."""
    reader = GGUFReader(path)
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ffn_down_exps.weight")
    values = dequantize(tensor.data, MXFP4)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = [[[table[(7 * e + 10 + 3 * r + k + k // 32) % 16] * 2.0 ** (100 + (17 * e + 62 + 5 * r) % 50 - 127)
                  for k in range(32)] for r in range(64)] for e in range(4)]
    same("our generator's file", values, np.array(expected, np.float32))


def check_converted(tool, folder, moe4):
    """The package reads what `moe4 convert` writes."""
    model, path = os.path.join(folder, "model"), os.path.join(folder, "converted.gguf")
    sizes = ["--hidden", "64", "--intermediate", "96", "--experts", "8", "--layers", "2"]
    subprocess.run([moe4, "synth", *sizes, model], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([moe4, "convert", model, path, "--to", "gguf"], stdout=subprocess.DEVNULL, check=True)
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    layer = Layer(tool, model, 1)
    values = {name: dequantize(tensors["blk.1.ffn_%s_exps.weight" % name].data, MXFP4) for name in ("gate", "up", "down")}
    for e, expert in enumerate(layer.experts):
        same("converted gate", expert["gate_up"][0::2], values["gate"][e])
        same("converted up", expert["gate_up"][1::2], values["up"][e])
        same("converted down", expert["down"], values["down"][e])
        same("converted bias", expert["gate_up_bias"][1::2], tensors["blk.1.ffn_up_exps.bias"].data[e])
    same("converted router", layer.router, tensors["blk.1.ffn_gate_inp.weight"].data)


def check_parts(tool, folder, moe4):
    """The package reads each of several files with gate and up in one tensor, of a model with other scores."""
    model, path = os.path.join(folder, "v4"), os.path.join(folder, "parts.gguf")
    sizes = ["--like", "deepseek-v4-flash", "--hidden", "64", "--intermediate", "96", "--experts", "8", "--layers", "2"]
    subprocess.run([moe4, "synth", *sizes, model], stdout=subprocess.DEVNULL, check=True)
    subprocess.run([moe4, "convert", model, path, "--to", "gguf-fused", "--shard-bytes", "1"], stdout=subprocess.DEVNULL,
                   check=True)
    for number in (0, 1):
        reader = GGUFReader(os.path.join(folder, "parts-%05d-of-00002.gguf" % (number + 1)))
        assert reader.get_field("split.no").contents() == number
        assert reader.get_field("split.count").contents() == 2
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        layer = Layer(tool, model, number)
        values = {name: dequantize(tensors["blk.%d.ffn_%s_exps.weight" % (number, name)].data, MXFP4)
                  for name in ("gate_up", "down")}
        for e, expert in enumerate(layer.experts):
            same("fused gate and up", expert["gate_up"], values["gate_up"][e])
            same("down", expert["down"], values["down"][e])
        same("router", layer.router, tensors["blk.%d.ffn_gate_inp.weight" % number].data)
        same("selection bias", layer.selection_bias, tensors["blk.%d.exp_probs_b.bias" % number].data)


def main(tool, folder, moe4):
    for arch in ("gpt-oss", "deepseek2"):
        path = os.path.join(folder, arch + ".gguf")
        check(tool, path, arch, write(path, arch))
    values = write(os.path.join(folder, "split.gguf"), "deepseek2", split_at=2)
    check(tool, os.path.join(folder, "split-00001-of-00003.gguf"), "deepseek2", values)
    check_converted(tool, folder, moe4)
    check_parts(tool, folder, moe4)
    check_ours(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "families", "gguf", "gpt-oss.gguf"))


if __name__ == "__main__":
    main(*sys.argv[1:])

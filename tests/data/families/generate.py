#!/usr/bin/env python3
"""Writes one small checkpoint a layout, from nothing but the standard library.

    generate.py OUT

Every layout holds the same weights, whose codes and scales are formulas of (expert, matrix, row, block), so that a test can
tell each byte without another file:

    code(e, m, r, k)   = (7 e + 5 m + 3 r + k + (k div 32)) mod 16          m: 0 gate, 1 up, 2 down
    scale(e, m, r, b)  = 100 + (17 e + 31 m + 5 r + 3 b) mod 50
    bias(e, m, r)      = (e - m + r mod 8) / 4
    router(e, h)       = ((e + 3 h) mod 17 - 8) / 8
    selection(e)       = (e - 2) / 16
    table(t, a)        = (t + 3 a) mod E

Sizes: E 4 experts, A 2 a token, H 64 (latent models: H 32 behind 64), I 32.  It shares no code with the library.
"""
import json
import os
import struct
import sys

E, A, H, I, VOCAB = 4, 2, 64, 32, 10
LATENT = 32


def rows_of(m, h):
    return h if m == 2 else I


def length_of(m, h):
    return I if m == 2 else h


def code(e, m, r, k):
    return (7 * e + 5 * m + 3 * r + k + k // 32) % 16


def scale(e, m, r, b):
    return 100 + (17 * e + 31 * m + 5 * r + 3 * b) % 50


def bias(e, m, r):
    return (e - m + r % 8) / 4


def codes_row(e, m, r, n):
    return bytes(code(e, m, r, k) | code(e, m, r, k + 1) << 4 for k in range(0, n, 2))


def scales_row(e, m, r, n):
    return bytes(scale(e, m, r, b) for b in range(n // 32))


def codes(e, m, h):
    return b"".join(codes_row(e, m, r, length_of(m, h)) for r in range(rows_of(m, h)))


def scales(e, m, h):
    return b"".join(scales_row(e, m, r, length_of(m, h)) for r in range(rows_of(m, h)))


def bf16(values):
    return b"".join(struct.pack("<f", v)[2:] for v in values)  # exact: few bits


def f32(values):
    return struct.pack("<%df" % len(values), *values)


def biases(e, m, h):
    return [bias(e, m, r) for r in range(rows_of(m, h))]


def router(h):
    return [((e + 3 * c) % 17 - 8) / 8 for e in range(E) for c in range(h)]


def selection():
    return [(e - 2) / 16 for e in range(E)]


def table():
    return [(t + 3 * a) % E for t in range(VOCAB) for a in range(A)]


# ---- safetensors

def save(folder, config, tensors, extra=None):
    os.makedirs(folder, exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    for name, content in [("config.json", config)] + list((extra or {}).items()):
        with open(os.path.join(folder, name), "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")


def interleaved(one, two, row_bytes):
    return b"".join(one[i:i + row_bytes] + two[i:i + row_bytes] for i in range(0, len(one), row_bytes))


def stacked_gpt_oss(words, gate):
    """gate and up interleaved, all experts in one tensor; words name the six tensors."""
    join = b"".join
    gate_up = [interleaved(codes(e, 0, H), codes(e, 1, H), H // 2) for e in range(E)]
    gate_up_scales = [interleaved(scales(e, 0, H), scales(e, 1, H), H // 32) for e in range(E)]
    gate_up_bias = [v for e in range(E) for pair in zip(biases(e, 0, H), biases(e, 1, H)) for v in pair]
    return {
        words[0]: ("U8", [E, 2 * I, H // 32, 16], join(gate_up)),
        words[1]: ("U8", [E, 2 * I, H // 32], join(gate_up_scales)),
        words[2]: ("BF16", [E, 2 * I], bf16(gate_up_bias)),
        words[3]: ("U8", [E, H, I // 32, 16], join(codes(e, 2, H) for e in range(E))),
        words[4]: ("U8", [E, H, I // 32], join(scales(e, 2, H) for e in range(E))),
        words[5]: ("BF16", [E, H], bf16([v for e in range(E) for v in biases(e, 2, H)])),
        gate + ".weight": ("BF16", [E, H], bf16(router(H))),
        gate + ".bias": ("BF16", [E], bf16(selection())),
    }


def apart(prefix, projections, code_word, scale_word, code_dtype="U8", scale_dtype="U8", h=H, with_bias=False):
    tensors = {}
    for e in range(E):
        for m, projection in enumerate(projections):
            name = "%s%d.%s." % (prefix, e, projection)
            rows, n = rows_of(m, h), length_of(m, h)
            tensors[name + code_word] = (code_dtype, [rows, n // 2], codes(e, m, h))
            tensors[name + scale_word] = (scale_dtype, [rows, n // 32], scales(e, m, h))
            if with_bias:
                tensors[name + "bias"] = ("BF16", [rows], bf16(biases(e, m, h)))
    return tensors


PROJ = ("gate_proj", "up_proj", "down_proj")
W = ("w1", "w3", "w2")
CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": {
    "targets": ["Linear"], "input_activations": None,
    "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                "scale_dtype": "torch.uint8"}}}}
CT_IN_GROUP = {"quant_method": "compressed-tensors", "config_groups": {
    "group_0": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
    "group_1": dict(CT["config_groups"]["group_0"], format="mxfp4-pack-quantized")}}
SIZES = {"hidden_size": H, "moe_intermediate_size": I, "num_experts_per_tok": A, "num_hidden_layers": 2}


def families(out):
    def at(name):
        return os.path.join(out, name)

    experts = "model.layers.1.mlp.experts."
    gpt_oss = {"model_type": "gpt_oss", "hidden_size": H, "intermediate_size": I, "num_local_experts": E,
               "num_experts_per_tok": A, "experts_per_token": A, "num_hidden_layers": 2, "swiglu_limit": 7.0}
    original = {"num_hidden_layers": 2, "num_experts": E, "experts_per_token": A, "vocab_size": 201088,
                "hidden_size": H, "intermediate_size": I, "swiglu_limit": 7.0, "initial_context_length": 4096}
    block = "block.1.mlp."
    tensors = stacked_gpt_oss([block + w for w in ("mlp1_weight.blocks", "mlp1_weight.scales", "mlp1_bias",
                                                   "mlp2_weight.blocks", "mlp2_weight.scales", "mlp2_bias")],
                              block + "gate")
    tensors[block + "norm.scale"] = ("F32", [H], f32([1.0] * H))
    save(at("openai"), original, tensors)

    released = [experts + w for w in ("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias",
                                      "down_proj_blocks", "down_proj_scales", "down_proj_bias")]
    save(at("modelopt_stacked"), gpt_oss, stacked_gpt_oss(released, "model.layers.1.mlp.router"),
         {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_MXFP4",
                                                                                     "group_size": 32}}})

    # MLX: one tensor a projection, words of eight codes
    tensors = {}
    for m, projection in enumerate(PROJ):
        name, rows, n = experts + projection + ".", rows_of(m, H), length_of(m, H)
        tensors[name + "weight"] = ("U32", [E, rows, n // 8], b"".join(codes(e, m, H) for e in range(E)))
        tensors[name + "scales"] = ("U8", [E, rows, n // 32], b"".join(scales(e, m, H) for e in range(E)))
        tensors[name + "bias"] = ("BF16", [E, rows], bf16([v for e in range(E) for v in biases(e, m, H)]))
    tensors["model.layers.1.mlp.router.weight"] = ("BF16", [E, H], bf16(router(H)))
    tensors["model.layers.1.mlp.router.bias"] = ("BF16", [E], bf16(selection()))
    save(at("mlx"), dict(gpt_oss, quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"}), tensors)

    # compressed-tensors
    gate = "model.layers.1.mlp.gate."
    weights = apart(experts, PROJ, "weight_packed", "weight_scale")
    qwen = dict(SIZES, model_type="qwen3_moe", num_experts=E, norm_topk_prob=True, hidden_act="silu",
                intermediate_size=128, quantization_config=CT)
    save(at("qwen3"), qwen, dict(weights, **{gate + "weight": ("BF16", [E, H], bf16(router(H)))}))

    ling = dict(SIZES, model_type="bailing_moe_v2", num_experts=E, norm_topk_prob=True, hidden_act="silu",
                score_function="sigmoid", n_group=2, topk_group=1, routed_scaling_factor=2.5,
                moe_router_enable_expert_bias=True, num_shared_experts=1, quantization_config=CT_IN_GROUP)
    save(at("ling"), ling, dict(weights, **{
        gate + "weight": ("F32", [E, H], f32(router(H))), gate + "expert_bias": ("F32", [E], f32(selection())),
        "model.layers.1.mlp.shared_experts.gate_proj.weight": ("BF16", [4, 2], bf16([0.0] * 8))}))

    deepseek = dict(SIZES, model_type="deepseek_v3", n_routed_experts=E, norm_topk_prob=True, hidden_act="silu",
                    scoring_func="sigmoid", topk_method="noaux_tc", n_group=2, topk_group=2,
                    routed_scaling_factor=2.5, n_shared_experts=1, quantization_config=CT)
    save(at("deepseek_v3"), deepseek, dict(weights, **{
        gate + "weight": ("BF16", [E, H], bf16(router(H))),
        gate + "e_score_correction_bias": ("F32", [E], f32(selection()))}))

    moe = "model.layers.1.block_sparse_moe."
    minimax = {"model_type": "minimax_m3", "hidden_size": H, "intermediate_size": I, "num_local_experts": E,
               "num_experts_per_tok": A, "num_hidden_layers": 2, "scoring_func": "sigmoid", "use_routing_bias": True,
               "routed_scaling_factor": 2.0, "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
               "quantization_config": CT}
    save(at("minimax_m3"), minimax, dict(apart(moe + "experts.", W, "weight_packed", "weight_scale"), **{
        moe + "gate.weight": ("BF16", [E, H], bf16(router(H))),
        moe + "e_score_correction_bias": ("F32", [E], f32(selection()))}))

    moe = "language_model." + moe
    text = {"num_experts": E, "num_experts_per_token": A, "num_shared_experts": 2, "hidden_size": H,
            "routed_expert_hidden_size": LATENT, "moe_intermediate_size": I, "num_hidden_layers": 2,
            "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
            "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "moe_renormalize": True,
            "routed_scaling_factor": 2.5, "latent_moe_use_norm": True, "quantization_config": CT}
    save(at("kimi_k3"), {"model_type": "kimi_k3", "text_config": text}, dict(
        apart(moe + "experts.", W, "weight_packed", "weight_scale", h=LATENT), **{
            moe + "gate.weight": ("BF16", [E, H], bf16(router(H))),
            moe + "gate.e_score_correction_bias": ("BF16", [E], bf16(selection())),
            moe + "latent_down_proj.weight": ("BF16", [LATENT, 2], bf16([0.0] * 2 * LATENT)),
            moe + "shared_experts.down_proj.weight": ("BF16", [4, 2], bf16([0.0] * 8))}))

    # DeepSeek-V4: layer 0 chooses by token id, layer 1 by scores, layer 2 is for multi-token prediction
    v4 = dict(SIZES, model_type="deepseek_v4", n_routed_experts=E, n_shared_experts=1, norm_topk_prob=True,
              scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, swiglu_limit=10.0, num_hash_layers=1,
              num_nextn_predict_layers=1, vocab_size=VOCAB, expert_dtype="fp4",
              quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]})
    tensors = {}
    for layer in ("layers.0.ffn.", "layers.1.ffn.", "mtp.0.ffn."):
        tensors.update(apart(layer + "experts.", W, "weight", "scale", "I8", "F8_E8M0"))
        tensors[layer + "gate.weight"] = ("BF16", [E, H], bf16(router(H)))
        tensors[layer + "shared_experts.w1.weight"] = ("F8_E4M3", [4, 2], bytes(8))
    tensors["layers.0.ffn.gate.tid2eid"] = ("I64", [VOCAB, A], struct.pack("<%dq" % (VOCAB * A), *table()))
    tensors["layers.1.ffn.gate.bias"] = ("F32", [E], f32(selection()))
    tensors["mtp.0.ffn.gate.bias"] = ("F32", [E], f32(selection()))
    save(at("deepseek_v4"), v4, tensors)
    nested = {k: v for k, v in v4.items() if k not in ("model_type", "quantization_config")}
    one = {k: v for k, v in tensors.items() if k.startswith("layers.1.")}
    save(at("deepseek_v41"), {"model_type": "deepseek_v41", "text_config": nested,
                              "quantization_config": v4["quantization_config"]}, one)

    # Quark: layer 0 in BF16, excluded; layer 1 in MXFP4
    fp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    quark = dict(qwen, quantization_config={
        "quant_method": "quark", "global_quant_config": {"weight": fp4, "input_tensors": None},
        "exclude": ["lm_head", "model.layers.1.mlp.gate", "re:model\\.layers\\.0\\..*"],
        "export": {"pack_method": "reorder"}})
    tensors = apart(experts, PROJ, "weight", "weight_scale")
    for e in range(E):
        for projection in PROJ:
            tensors["model.layers.0.mlp.experts.%d.%s.weight" % (e, projection)] = ("BF16", [1, 2], bytes(4))
            tensors[experts + "%d.%s.input_scale" % (e, projection)] = ("F32", [1], f32([1.0]))
    tensors[gate + "weight"] = ("BF16", [E, H], bf16(router(H)))
    save(at("quark"), quark, tensors)

    save(at("modelopt"), dict(qwen, quantization_config={"quant_method": "modelopt", "quant_algo": "MXFP4"}), dict(
        apart(experts, PROJ, "weight", "weight_scale", "I8", "F8_E8M0"), **{
            gate + "weight": ("BF16", [E, H], bf16(router(H)))}))


# ---- GGUF

def gguf_string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_value(value):
    """u32 for a number, f32, bool or string by Python's type; a list of floats is an f32 array, of strings a string one."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(v) for v in value)
    return struct.pack("<IIQ", 9, 6, len(value)) + f32(value)


def gguf_save(path, pairs, tensors, alignment=32):
    """tensors: name -> (type, dimensions innermost first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    for key, value in pairs.items():
        raw = isinstance(value, bytes)
        head += gguf_string(key) + (value if raw else gguf_value(value))
    data = b""
    for name, (kind, dims, content) in tensors.items():
        head += gguf_string(name) + struct.pack("<I", len(dims)) + struct.pack("<%dQ" % len(dims), *dims)
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % alignment)
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % alignment) + data)


def blocks(e, m, h):
    """MXFP4 blocks: the scale, then byte j with elements j and j + 16."""
    out = b""
    for r in range(rows_of(m, h)):
        for b in range(length_of(m, h) // 32):
            out += bytes([scale(e, m, r, b)])
            out += bytes(code(e, m, r, 32 * b + j) | code(e, m, r, 32 * b + j + 16) << 4 for j in range(16))
    return out


def gguf_experts(layer, h=H, fused=False, with_bias=False):
    tensors, join = {}, b"".join
    words = ("gate", "up", "down")
    if fused:
        tensors["blk.%d.ffn_gate_up_exps.weight" % layer] = (
            39, [h, 2 * I, E], join(blocks(e, 0, h) + blocks(e, 1, h) for e in range(E)))
    for m in range(2 if fused else 0, 3):
        name = "blk.%d.ffn_%s_exps." % (layer, words[m])
        tensors[name + "weight"] = (39, [length_of(m, h), rows_of(m, h), E], join(blocks(e, m, h) for e in range(E)))
        if with_bias:
            tensors[name + "bias"] = (0, [rows_of(m, h), E], f32([v for e in range(E) for v in biases(e, m, h)]))
    return tensors


def gguf_files(out):
    def at(name):
        return os.path.join(out, name)

    def keys(word, **values):
        pairs = {"general.architecture": word, "general.file_type": 38, "general.quantization_version": 2,
                 "tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.chat_template": "{{x}}"}
        base = {"block_count": 2, "embedding_length": H, "expert_count": E, "expert_used_count": A,
                "expert_feed_forward_length": I}
        for key, value in dict(base, **values).items():
            pairs[word + "." + key.replace("situ_", "activation.situ_")] = value
        return pairs

    os.makedirs(out, exist_ok=True)
    gate = (0, [H, E], f32(router(H)))
    norm = {"blk.0.attn_norm.weight": (0, [H], f32([1.0] * H))}
    gguf_save(at("gpt-oss.gguf"), keys("gpt-oss"), dict(
        norm, **gguf_experts(1, with_bias=True), **{
            "blk.1.ffn_gate_inp.weight": gate, "blk.1.ffn_gate_inp.bias": (0, [E], f32(selection()))}))

    gguf_save(at("deepseek2.gguf"), dict(
        keys("deepseek2", expert_gating_func=2, expert_weights_norm=True, expert_weights_scale=2.5,
             expert_group_count=2, expert_group_used_count=1, expert_shared_count=1, leading_dense_block_count=1),
        **{"general.alignment": 64}), dict(
            gguf_experts(1, fused=True), **{
                "blk.1.ffn_gate_inp.weight": gate, "blk.1.exp_probs_b.bias": (0, [E], f32(selection())),
                "blk.1.ffn_up_shexp.weight": (0, [2, 4], f32([0.0] * 8))}), alignment=64)

    gguf_save(at("deepseek4.gguf"), keys("deepseek4", expert_gating_func=4, expert_weights_norm=True,
                                         expert_weights_scale=1.5, swiglu_clamp_exp=[0.0, 10.0], hash_layer_count=1),
              dict(gguf_experts(0), **gguf_experts(1), **{
                  "blk.0.ffn_gate_inp.weight": gate, "blk.1.ffn_gate_inp.weight": gate,
                  "blk.0.ffn_gate_tid2eid.weight": (26, [A, VOCAB], struct.pack("<%di" % (VOCAB * A), *table())),
                  "blk.1.exp_probs_b.bias": (0, [E], f32(selection()))}))

    kimi = keys("kimi-k3", expert_gating_func=2, expert_weights_norm=True, expert_weights_scale=2.5,
                expert_latent_length=LATENT, situ_beta=4.0, situ_linear_beta=25.0)
    first = dict(gguf_experts(1, h=LATENT), **{"blk.1.ffn_gate_inp.weight": gate})
    second = {"blk.1.exp_probs_b.bias": (0, [E], f32(selection())),
              "blk.1.ffn_latent_down.weight": (0, [2, 4], f32([0.0] * 8))}

    def split(number):
        return {"split.no": struct.pack("<IH", 2, number), "split.count": struct.pack("<IH", 2, 2),
                "split.tensors.count": struct.pack("<Ii", 5, len(first) + len(second))}

    gguf_save(at("kimi-k3-00001-of-00002.gguf"), dict(kimi, **split(0)), first)
    gguf_save(at("kimi-k3-00002-of-00002.gguf"), split(1), second)


if __name__ == "__main__":
    families(sys.argv[1])
    gguf_files(os.path.join(sys.argv[1], "gguf"))

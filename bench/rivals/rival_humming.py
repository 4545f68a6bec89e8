"""humming, as vLLM runs it: its indexed GEMMs, vLLM's routing, activation and sum.

The second class gives both GEMMs fp8 activations, a scale a token; their sums are not promoted.
"""

import importlib.util
import json

import torch

import vllm_ops
from layer import Rival


class Gemm:
    def __init__(self, matrix, activation_type):
        from humming.layer import HummingLayer

        E, N = matrix.bias.shape
        K = matrix.codes.shape[2] * 2
        self.layer = HummingLayer(
            shape_n=N,
            shape_k=K,
            num_experts=E,
            has_bias=True,
            torch_dtype=torch.bfloat16,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            weight_config={"quant_method": "mxfp4"},
            input_config={"quant_method": "humming", "dtype": activation_type},
        ).cuda()
        tensors = {"weight": matrix.codes, "weight_scale": matrix.scales, "bias": matrix.bias.bfloat16()}
        self.layer.load_from_tensors(tensors)
        self.layer.transform()

    def tiling(self, n_slots):
        from humming.tune import get_heuristics_config

        return get_heuristics_config(self.layer.humming_config, shape_m=n_slots, gemm_type="indexed")

    def __call__(self, x, top_k, aligned, tiling, n_slots):
        slots, experts, count = aligned
        return self.layer(
            x,
            sorted_ids=slots,
            expert_ids=experts,
            num_tokens_padded=count,
            top_k=top_k,
            valid_shape_m=n_slots,
            compute_config=json.dumps({"gemm_type": "indexed"}),
            tuning_config=json.dumps([(0, 1 << 30, tiling)]),
        )


class Experts(Rival):
    activation_type = "bfloat16"

    @staticmethod
    def missing():
        return vllm_ops.missing() if importlib.util.find_spec("humming") else "no humming"

    def __init__(self, layer):
        super().__init__(layer)
        self.gemm1 = Gemm(vllm_ops.gate_up(layer), self.activation_type)
        self.gemm2 = Gemm(layer.w2, self.activation_type)

    def forward(self, x, logits):
        T, E, A = len(x), self.shape.E, self.shape.A
        weights, ids = vllm_ops.route(logits, A)
        tiling1, tiling2 = self.gemm1.tiling(T * A), self.gemm2.tiling(T * A)
        block1, block2 = (tiling["block_shape"][0] for tiling in (tiling1, tiling2))
        aligned1 = vllm_ops.align(ids, E, block1)
        aligned2 = aligned1 if block1 == block2 else vllm_ops.align(ids, E, block2)
        h = self.gemm1(x, A, aligned1, tiling1, T * A)
        z = self.gemm2(vllm_ops.activate(h, self.shape), 1, aligned2, tiling2, T * A)
        return combine(z.view(T, A, -1), weights)


@torch.compile(dynamic=True)
def combine(z, weights):
    return (z.float() * weights.unsqueeze(-1)).sum(1).bfloat16()


class ExpertsFp8(Experts):
    activation_type = "float8e4m3"

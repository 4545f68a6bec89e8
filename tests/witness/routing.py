"""Routers: logits to ids and weights."""

import torch
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeTopKRouter
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter, DeepseekV4TopKRouter
from transformers.models.flint.modeling_flint import FlintTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from common import config, integers, normal, random, save

N_TOKENS = 16

# Every bf16 from 2^-4 to 8, of both signs: exact in f16 too, and no two alike, so that a row of them has no ties.
DISTINCT = torch.arange(0x3D80, 0x4100, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
DISTINCT = torch.cat([DISTINCT, -DISTINCT])


def distinct_logits(n_tokens, n_experts):
    rows = [DISTINCT[torch.randperm(len(DISTINCT), generator=random)[:n_experts]] for _ in range(n_tokens)]
    return torch.stack(rows)


def moving_rows(route, logits):
    """Rows whose experts depend on the logits' last bits: another program's rounding may choose others."""
    ids = route(logits.float())[1].sort(-1).values
    moving = torch.zeros(len(logits), dtype=torch.bool)
    for _ in range(4):
        near = route(logits.float() + 2e-5 * normal(*logits.shape))[1].sort(-1).values
        moving |= (near != ids).any(-1)
    return moving


def save_route(folder, name, witness, route, n_experts, top_k, n_tokens=N_TOKENS, tensors=None, **parameters):
    """route(logits) -> weights, ids.  Slots are in the router's own order: "descending", or any."""
    logits = distinct_logits(n_tokens, n_experts)
    while (moving := moving_rows(route, logits)).any():
        logits[moving] = distinct_logits(int(moving.sum()), n_experts)
    weights, ids = route(logits.float())
    tensors = {"logits": logits, "ids": ids.int(), "weights": weights.double()} | (tensors or {})
    save(folder, f"route_{name}", witness, tensors, top_k=top_k, **parameters)


def fed(router):
    """A router whose linear layer hands its input on as logits."""
    linear = getattr(router, "gate", router)
    linear.weight.data = torch.eye(linear.weight.shape[0])
    return router


def save_router(folder, name, method, router_class, n_experts, top_k, fields=None, order="descending", **parameters):
    """A class that returns logits, weights, ids."""
    router = fed(router_class(config(n_experts, top_k, **(fields or {}))))
    witness = f"transformers {router_class.__name__}"
    route = lambda logits: router(logits)[1:]
    save_route(folder, name, witness, route, n_experts, top_k, method=method, order=order, **parameters)


def save_biased(folder, name, method, router_class, bias, top_k, fields, n_tokens=N_TOKENS):
    """The same for a class that holds its selection bias."""
    n_experts = len(bias)
    router = fed(router_class(config(n_experts, top_k, **fields)))
    router.e_score_correction_bias.copy_(bias)
    parameters = {key: fields[key] for key in ("n_group", "topk_group") if key in fields}
    parameters["scaling_factor"] = fields.get("routed_scaling_factor", 1.0)
    witness = f"transformers {router_class.__name__}"
    route = lambda logits: router(logits)[1:]
    tensors = {"correction_bias": bias}
    save_route(
        folder, name, witness, route, n_experts, top_k, n_tokens, tensors, method=method, order="any", **parameters
    )


def generate_unbiased(folder):
    softmax_only = dict(norm_topk_prob=False)
    scaled = dict(topk_method="greedy", routed_scaling_factor=16.0)
    survivors = dict(expert_selection_fn="sigmoid", norm_topk_prob=False)
    save_router(folder, "default", "default", Qwen3MoeTopKRouter, 128, 8, softmax_only)
    save_router(folder, "default_scaled", "default", DeepseekV2TopkRouter, 72, 6, scaled, "any", scaling_factor=16.0)
    save_router(folder, "renormalize", "renormalize", GptOssTopKRouter, 32, 4)
    save_router(folder, "renormalize_naive", "renormalize_naive", MixtralTopKRouter, 8, 2)
    save_router(folder, "sigmoid_renorm", "sigmoid_renorm", FlintTopKRouter, 96, 8)
    save_router(folder, "sigmoid_renorm_no", "sigmoid_renorm", FlintTopKRouter, 96, 8, softmax_only, renormalize="no")
    save_router(folder, "sigmoid", "sigmoid", FlintTopKRouter, 64, 4, softmax_only)
    save_router(folder, "topk_sigmoid", "topk_sigmoid", Cohere2MoeTopKRouter, 64, 4, survivors)

    largest = lambda logits: torch.topk(logits, 8, dim=-1)
    save_route(folder, "topk", "torch.topk", largest, 16, 8, method="topk", order="descending")

    llama4 = fed(Llama4Router(config(16, 1)))
    best = lambda logits: torch.topk(llama4(logits)[0], 1, dim=-1)  # it returns [T, E], 0 but for the chosen
    save_route(folder, "llama4", "transformers Llama4Router", best, 16, 1, method="llama4", order="descending")


def generate_deepseek(folder):
    grouped = dict(n_group=8, topk_group=4, routed_scaling_factor=2.5)
    save_biased(folder, "deepseek_v3", "deepseek_v3", DeepseekV3TopkRouter, 0.1 * normal(256), 8, grouped)
    # Keys below zero: a group that is left out must not win with a zero.
    grouped = dict(n_group=4, topk_group=2)
    save_biased(folder, "deepseek_v3_negative", "deepseek_v3", NemotronHTopkRouter, 0.3 * normal(64) - 2, 6, grouped)
    # A bias beside which scores vanish: weights must not come from the keys.
    scaled = dict(routed_scaling_factor=2.5)
    save_biased(folder, "deepseek_v3_ungrouped", "deepseek_v3", Glm4MoeTopkRouter, 12 + normal(160), 8, scaled)
    save_biased(folder, "deepseek_v3_many", "deepseek_v3", KimiLinearTopkRouter, 0.1 * normal(896), 16, scaled, 8)

    fields = dict(scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
    save_biased(folder, "sqrt_softplus", "sqrt_softplus", DeepseekV4TopKRouter, 0.1 * normal(256), 6, fields)

    n_experts, top_k, vocab = 256, 6, 40
    router = fed(DeepseekV4HashRouter(config(n_experts, top_k, vocab_size=vocab, **fields)))
    table, tokens = integers(n_experts, vocab, top_k), integers(vocab, N_TOKENS)
    table[::3, 1] = table[::3, 0]  # one expert twice
    router.tid2eid.copy_(table)
    route = lambda logits: router(logits, tokens)[1:]
    tensors = {"hash_table": table.int(), "token_ids": tokens.int()}
    parameters = dict(method="hash", order="descending", scaling_factor=1.5)
    witness = "transformers DeepseekV4HashRouter"
    save_route(folder, "hash", witness, route, n_experts, top_k, tensors=tensors, **parameters)


def generate_minimax(folder):
    bias = 0.1 * normal(256)
    minimax = fed(MiniMaxM2TopKRouter(config(256, 8)))
    route = lambda logits: minimax(logits, bias)[1:]
    witness, tensors = "transformers MiniMaxM2TopKRouter", {"correction_bias": bias}
    save_route(folder, "minimax2", witness, route, 256, 8, tensors=tensors, method="minimax2", order="any")

    scale, scaled_bias = 2.826, 0.1 * normal(128)
    afmoe = fed(AfmoeTokenChoiceRouter(config(128, 8, route_scale=scale)))
    route = lambda logits: afmoe(logits[None], scaled_bias)[1:]
    witness, tensors = "transformers AfmoeTokenChoiceRouter", {"correction_bias": scaled_bias}
    parameters = dict(method="minimax2", order="any", scaling_factor=scale)
    save_route(folder, "minimax2_scaled", witness, route, 128, 8, tensors=tensors, **parameters)


def generate(folder):
    generate_unbiased(folder)
    generate_deepseek(folder)
    generate_minimax(folder)

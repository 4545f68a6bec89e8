"""Whole layers: the MoE blocks of transformers in f64, on MXFP4 weights that transformers' own decoder decodes."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from transformers.models.step3p7.modeling_step3p7 import Step3p7SparseMoeBlock

from common import config, integers, normal, random, save

# One set of weights for all layers: E routed experts, then two that serve as shared ones.
T, H, I, E, A, N_SHARED, VOCAB = 16, 64, 64, 8, 2, 2, 12


def distinct_ids(rows):
    return torch.stack([torch.randperm(E, generator=random)[:A] for _ in range(rows)])


def layer_weights():
    n = E + N_SHARED
    return {
        "gate_up_codes": integers(256, n, 2 * I, H // 2).to(torch.uint8),
        "gate_up_scales": (121 + integers(4, n, 2 * I, H // 32)).to(torch.uint8),
        "gate_up_bias": (0.5 * normal(n, 2 * I)).bfloat16(),
        "down_codes": integers(256, n, H, I // 2).to(torch.uint8),
        "down_scales": (121 + integers(4, n, H, I // 32)).to(torch.uint8),
        "down_bias": (0.5 * normal(n, H)).bfloat16(),
        "x": normal(T, H).bfloat16(),
        "router": (0.25 * normal(E, H)).bfloat16(),
        "router_bias": normal(E).bfloat16(),
        "correction_bias": 0.2 * normal(E),
        "hash_table": distinct_ids(VOCAB).int(),
        "token_ids": integers(VOCAB, T).int(),
    }


def layer_config(top_k=A, **more):
    sizes = dict(hidden_size=H, intermediate_size=I, moe_intermediate_size=I, mlp_bias=False, hidden_act="silu")
    return config(E, top_k, **(sizes | more))


def decoded(codes, scales):
    """[experts, columns, rows] f64."""
    return convert_moe_packed_tensors(codes.reshape(*scales.shape, 16), scales, dtype=torch.float64)


class Weights:
    def __init__(self, folder):
        self.folder, self.stored = folder, layer_weights()
        self.gate_up = decoded(self.stored["gate_up_codes"], self.stored["gate_up_scales"])
        self.down = decoded(self.stored["down_codes"], self.stored["down_scales"])
        self.x = self.stored["x"].double()
        save(folder, "layer_weights", "random numbers", self.stored)

    def of(self, name):
        return self.stored[name].double()

    def into_columns(self, experts):
        """A class that keeps [E, columns, rows]."""
        experts.gate_up_proj.data, experts.down_proj.data = self.gate_up[:E], self.down[:E]

    def into_rows(self, experts, first="gate_up_proj"):
        """A class that keeps [E, rows, columns]; without a gate it takes the first I rows."""
        n_rows = getattr(experts, first).shape[1]
        getattr(experts, first).data = self.gate_up[:E].transpose(1, 2)[:, :n_rows].contiguous()
        experts.down_proj.data = self.down[:E].transpose(1, 2).contiguous()

    def into_router(self, router):
        router.weight.data = self.of("router")
        if hasattr(router, "e_score_correction_bias"):
            router.e_score_correction_bias = self.of("correction_bias")

    def into_shared(self, shared):
        """One MLP as wide as all the shared experts together."""
        gate, up = self.gate_up[E:].transpose(1, 2).chunk(2, dim=1)
        shared.gate_proj.weight.data = gate.reshape(N_SHARED * I, H)
        shared.up_proj.weight.data = up.reshape(N_SHARED * I, H)
        shared.down_proj.weight.data = self.down[E:].reshape(N_SHARED * I, H).T.contiguous()

    def save(self, name, block, output, tensors=None, top_k=A, gate_up="gate_first", **parameters):
        output = output[0] if isinstance(output, tuple) else output
        tensors = {"output": output.reshape(T, H)} | (tensors or {})
        witness = f"transformers {type(block).__name__}"
        save(self.folder, f"layer_{name}", witness, tensors, top_k=top_k, gate_up=gate_up, **parameters)


def in_f64(block):
    return block.double().eval()


def silence(module):
    for parameter in module.parameters():
        parameter.data.zero_()


def generate_gpt_oss(weights):
    block = in_f64(GptOssMLP(layer_config(swiglu_alpha=1.702, swiglu_limit=2.5)))
    weights.into_columns(block.experts)
    weights.into_router(block.router)
    block.router.bias.data = weights.of("router_bias")
    block.experts.gate_up_proj_bias.data = weights.of("gate_up_bias")[:E]
    block.experts.down_proj_bias.data = weights.of("down_bias")[:E]
    parameters = dict(method="renormalize", activation="swiglu_oai", alpha=1.702, beta=1.0, limit=2.5, biases="yes")
    weights.save("gpt_oss", block, block(weights.x[None]), gate_up="interleaved", **parameters)


def generate_silu(weights):
    blocks = [
        ("mixtral", "renormalize_naive", MixtralSparseMoeBlock, {}),
        ("qwen3_moe", "default", Qwen3MoeSparseMoeBlock, dict(norm_topk_prob=False)),
        ("minimax_m2", "minimax2", MiniMaxM2SparseMoeBlock, {}),
    ]
    for name, method, block_class, fields in blocks:
        block = in_f64(block_class(layer_config(router_jitter_noise=0.0, **fields)))
        weights.into_rows(block.experts)
        weights.into_router(block.gate)
        parameters = dict(method=method, activation="silu")
        if hasattr(block, "e_score_correction_bias"):
            block.e_score_correction_bias = weights.of("correction_bias")
            parameters["correction"] = "yes"
        weights.save(name, block, block(weights.x[None]), **parameters)


def generate_llama4(weights):
    block = in_f64(Llama4TextMoe(layer_config(top_k=1)))
    weights.into_columns(block.experts)
    weights.into_router(block.router)
    silence(block.shared_expert)
    parameters = dict(method="llama4", activation="silu", weight_use="input")
    weights.save("llama4", block, block(weights.x[None]), top_k=1, **parameters)


def generate_gemma4(weights):
    experts = in_f64(Gemma4TextExperts(layer_config(hidden_activation="gelu_pytorch_tanh")))
    weights.into_rows(experts)
    ids, shares = distinct_ids(T), torch.rand(T, A, generator=random)
    tensors = {"ids": ids.int(), "weights": shares}
    output = experts(weights.x, ids, shares.double())
    weights.save("gemma4", experts, output, tensors, method="none", activation="geglu_tanh")


def generate_deepseek_v3(weights):
    fields = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, n_shared_experts=N_SHARED)
    block = in_f64(DeepseekV3MoE(layer_config(**fields)))
    weights.into_rows(block.experts)
    weights.into_router(block.gate)
    weights.into_shared(block.shared_experts)
    tensors = {"output_with_shared": block(weights.x[None])[0]}
    silence(block.shared_experts)
    parameters = dict(n_group=4, topk_group=2, scaling_factor=2.5, correction="yes", activation="silu")
    weights.save("deepseek_v3", block, block(weights.x[None]), tensors, method="deepseek_v3", **parameters)


def generate_deepseek_v4(weights):
    fields = dict(scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, swiglu_limit=2.0, vocab_size=VOCAB)
    parameters = dict(activation="silu", scaling_factor=1.5, limit=2.0)

    block = in_f64(DeepseekV4SparseMoeBlock(layer_config(mlp_layer_types=["moe"], **fields), 0))
    weights.into_rows(block.experts)
    weights.into_router(block.gate)
    silence(block.shared_experts)
    output = block(weights.x[None])
    weights.save("deepseek_v4", block, output, method="sqrt_softplus", correction="yes", **parameters)

    block = in_f64(DeepseekV4SparseMoeBlock(layer_config(mlp_layer_types=["hash_moe"], **fields), 0))
    weights.into_rows(block.experts)
    weights.into_router(block.gate)
    silence(block.shared_experts)
    block.gate.tid2eid = weights.stored["hash_table"].long()
    output = block(weights.x[None], weights.stored["token_ids"].long())
    weights.save("deepseek_v4_hash", block, output, method="hash", **parameters)


def generate_nemotron_h(weights):
    fields = dict(mlp_hidden_act="relu2", moe_latent_size=None, moe_shared_expert_intermediate_size=I)
    block = in_f64(NemotronHMoE(layer_config(routed_scaling_factor=2.0, **fields)))
    weights.into_rows(block.experts, "up_proj")
    weights.into_router(block.gate)
    silence(block.shared_experts)
    parameters = dict(method="deepseek_v3", activation="relu2", correction="yes", scaling_factor=2.0)
    weights.save("nemotron_h", block, block(weights.x[None]), gate_up="none", **parameters)


def generate_step3p7(weights):
    fields = dict(swiglu_limits=[1.5], swiglu_limits_shared=None, share_expert_dim=I, moe_router_scaling_factor=3.0)
    block = in_f64(Step3p7SparseMoeBlock(layer_config(**fields), 0))
    weights.into_rows(block.experts)
    weights.into_router(block.gate)
    silence(block.shared_experts)
    parameters = dict(method="minimax2", activation="swiglu_step", correction="yes", scaling_factor=3.0, limit=1.5)
    weights.save("step3p7", block, block(weights.x[None]), **parameters)


def generate(folder):
    weights = Weights(folder)
    generate_gpt_oss(weights)
    generate_silu(weights)
    generate_llama4(weights)
    generate_gemma4(weights)
    generate_deepseek_v3(weights)
    generate_deepseek_v4(weights)
    generate_nemotron_h(weights)
    generate_step3p7(weights)

"""Activations: gate and up to v, with one set of parameters for each of three experts."""

from types import SimpleNamespace

import mpmath
import torch
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SiluAndMulWithClamp, SituAndMul

from common import normal, random, save

N_POINTS = 128
INFINITY = float("inf")


def points(limits, reach):
    """[3, N_POINTS] f32 up to +-reach: small and large numbers, and what lies around each expert's limit."""
    rows = []
    for limit in limits:
        edge = torch.tensor([limit])
        some = torch.tensor([0.0, 1e-30, 1e-3, 0.5, 1.0, reach])
        some = torch.cat([some, edge, edge.nextafter(edge + 1), edge.nextafter(edge - 1), 1.5 * edge])
        row = torch.cat([some, -some, 2 * normal(50), 8 * normal(N_POINTS - 50 - 2 * len(some))])
        rows.append(row[torch.randperm(N_POINTS, generator=random)].clamp(-reach, reach))
    return torch.stack(rows)


def save_activation(folder, name, activation, witness, function, *, dtype=torch.float64, reach=30.0, **parameters):
    """function(gate, up, one expert's parameters) -> v; dtype: what it computes in; parameters: three numbers each."""
    limits = parameters.get("limit", [3.0, 7.0, 10.0])
    gate, up = points(limits, reach), points(limits, 30.0)
    parameters = {key: torch.tensor(values) for key, values in parameters.items()}
    rows = []
    for expert in range(3):
        own = SimpleNamespace(**{key: float(values[expert]) for key, values in parameters.items()})
        rows.append(function(gate[expert].to(dtype), up[expert].to(dtype), own).double())
    tensors = {"gate": gate, "up": up, "v": torch.stack(rows)} | parameters
    arithmetic = "f64" if dtype is torch.float64 else "f32"
    save(folder, f"activation_{name}", witness, tensors, activation=activation, arithmetic=arithmetic)


def halves(gate, up):
    return torch.cat([gate, up], -1)


def silu(gate, up, own):
    return SiluAndMul.forward_native(halves(gate, up))


def gate_of(experts_class):
    """The gate of a transformers class that clamps around SiLU."""

    def run(gate, up, own):
        experts = SimpleNamespace(act_fn=ACT2FN["silu"], limit=getattr(own, "limit", INFINITY))
        return experts_class._apply_gate(experts, halves(gate, up))

    return run


def gpt_oss(gate, up, own):
    return GptOssExperts._apply_gate(own, torch.stack([gate, up], -1).flatten(-2))


def silu_with_clamp(gate, up, own):
    limit, beta = getattr(own, "limit", INFINITY), getattr(own, "beta", 0.0)
    values = SimpleNamespace(swiglu_limit=limit, alpha=own.alpha, beta=beta)
    return SiluAndMulWithClamp.forward_native(values, halves(gate, up))


def situ(gate, up, own):
    if hasattr(own, "limit"):  # which the class has not
        gate, up = gate.clamp(max=own.limit), up.clamp(-own.limit, own.limit)
    values = SimpleNamespace(beta=own.alpha, linear_beta=getattr(own, "beta", None))
    return SituAndMul.forward_native(values, halves(gate, up))


def gelu(approximate):
    values = SimpleNamespace(approximate=approximate)
    return lambda gate, up, own: GeluAndMul.forward_native(values, halves(gate, up))


def in_50_digits(function):
    """function(gate, up, own) of mpmath numbers, after torch's clamp."""

    def run(gate, up, own):
        gate, up = gate.clamp(max=own.limit), up.clamp(-own.limit, own.limit)
        with mpmath.workdps(50):
            v = [float(function(mpmath.mpf(g), mpmath.mpf(u), own)) for g, u in zip(gate.tolist(), up.tolist())]
        return torch.tensor(v, dtype=torch.float64)

    return run


def geglu(g, u, own):
    return g * mpmath.ncdf(own.alpha * g) * (u + own.beta)


def geglu_tanh(g, u, own):
    z = own.alpha * g
    z = mpmath.sqrt(2 / mpmath.pi) * (z + mpmath.mpf("0.044715") * z**3)
    return g * (1 + mpmath.tanh(z)) / 2 * (u + own.beta)


def generate_silu(folder):
    deepseek_v4, step3p7 = gate_of(DeepseekV4Experts), gate_of(Step3p7Experts)
    save_activation(folder, "silu", "silu", "vllm SiluAndMul", silu)
    limit = dict(limit=[0.5, 7.0, 10.0])
    save_activation(folder, "silu_limit", "silu", "transformers DeepseekV4Experts", deepseek_v4, **limit)

    own = dict(alpha=[1.702, 1.0, 0.5], beta=[1.0] * 3, limit=[7.0, 2.0, 10.0])  # its beta is always 1
    save_activation(folder, "swiglu_oai", "swiglu_oai", "transformers GptOssExperts", gpt_oss, **own)
    own, witness = (
        dict(alpha=[1.702, -0.3, 0.0], beta=[0.0, -2.5, 0.125], limit=[7.0, 0.75, 20.0]),
        "vllm SiluAndMulWithClamp",
    )
    save_activation(folder, "swiglu_oai_all", "swiglu_oai", witness, silu_with_clamp, **own)
    own = dict(alpha=[1.702, 1.0, 3.0])
    save_activation(folder, "swiglu_oai_no_limit", "swiglu_oai", witness, silu_with_clamp, **own)

    own, witness = dict(limit=[7.0, 0.5, 16.0]), "transformers Step3p7Experts"
    save_activation(folder, "swiglu_step", "swiglu_step", witness, step3p7, **own)
    save_activation(folder, "swiglu_step_no_limit", "swiglu_step", witness, step3p7)


def generate_situ(folder):
    f32 = torch.float32  # the class leaves it no choice
    own = dict(alpha=[4.0, 1.0, 0.5], beta=[25.0, 1.0, 3.0])
    save_activation(folder, "situ", "situ", "vllm SituAndMul", situ, dtype=f32, **own)
    own = dict(alpha=[4.0, 1.0, 0.5])
    save_activation(folder, "situ_no_beta", "situ", "vllm SituAndMul", situ, dtype=f32, **own)
    own = dict(alpha=[1.7, 4.0, 4.0], beta=[1.0, 25.0, 25.0], limit=[7.0, 2.0, 0.5])
    save_activation(folder, "situ_limit", "situ", "torch.clamp, vllm SituAndMul", situ, dtype=f32, **own)


def generate_gelu(folder):
    # In f64 torch's GELU loses its small values, below about -5, to cancellation.
    save_activation(folder, "geglu", "geglu", "vllm GeluAndMul", gelu("none"), reach=4.0)
    save_activation(folder, "geglu_tanh", "geglu_tanh", "vllm GeluAndMul", gelu("tanh"), reach=4.0)
    own = dict(alpha=[1.0, 1.7, -0.7], beta=[0.0, 1.0, -0.5], limit=[7.0, 3.0, 10.0])
    witness = "mpmath.ncdf, formula"
    save_activation(folder, "geglu_all", "geglu", witness, in_50_digits(geglu), reach=8.0, **own)
    witness = "mpmath.tanh, formula"
    save_activation(folder, "geglu_tanh_all", "geglu_tanh", witness, in_50_digits(geglu_tanh), reach=8.0, **own)


def generate(folder):
    generate_silu(folder)
    generate_situ(folder)
    generate_gelu(folder)
    square, linear = ACT2FN["relu2"], ACT2FN["linear"]
    save_activation(folder, "relu2", "relu2", "transformers ReLUSquaredActivation", lambda g, u, own: square(u))
    save_activation(folder, "identity", "identity", "transformers LinearActivation", lambda g, u, own: linear(u))

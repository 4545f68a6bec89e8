"""PyTorch's grouped matrix product, with weights that are bf16 already: four times the bytes."""

import torch

from layer import Rival


@torch.compile(dynamic=True)
def activate(h, bias, experts, alpha: float, beta: float, limit: float):
    gate, up = (h.float() + bias[experts]).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).bfloat16()


@torch.compile(dynamic=True)
def combine(z, bias, experts, slots, weights):
    rows = (z.float() + bias[experts])[slots].view(*weights.shape, -1)
    return (rows * weights.unsqueeze(-1)).sum(1).bfloat16()


class Experts(Rival):
    @staticmethod
    def missing():
        return None if hasattr(torch, "_grouped_mm") else f"PyTorch {torch.__version__} has no _grouped_mm"

    def __init__(self, layer):
        super().__init__(layer)
        w1 = layer.halves()
        self.w1, self.bias1 = self.dense(w1), w1.bias.bfloat16()
        self.w2, self.bias2 = self.dense(layer.w2), layer.w2.bias.bfloat16()
        self.ids = torch.arange(self.shape.E, device="cuda")

    @staticmethod
    def dense(matrix):
        return torch.stack([matrix.dense(e).bfloat16() for e in range(len(matrix.codes))]).mT

    def forward(self, x, logits):
        shape = self.shape
        values, ids = logits.topk(shape.A)
        experts, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self.ids, right=True, out_int32=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(len(order), device="cuda")
        h = torch._grouped_mm(x[order // shape.A], self.w1, offs=ends)
        limit = float("inf") if shape.limit is None else shape.limit
        v = activate(h, self.bias1, experts, shape.alpha, shape.beta, limit)
        z = torch._grouped_mm(v, self.w2, offs=ends)
        return combine(z, self.bias2, experts, slots, values.softmax(-1))

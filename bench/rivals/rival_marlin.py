"""The Marlin kernel of vLLM, with sizes padded as vLLM pads them (I to 128, H to 256; x has its padding already)."""

import torch

import vllm_ops
from layer import Rival

E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49  # vLLM's number of the type: exponent and mantissa bits, signed, finite only


def fragment_order():
    """Where the 1024 codes of 16 k by 64 rows go: eight of a lane's k and rows to a word, as the kernel decodes it."""
    lane, word, place = torch.meshgrid(torch.arange(32), torch.arange(4), torch.arange(8), indexing="ij")
    place = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])[place]
    row = word * 16 + lane // 4 + place // 4 * 8
    k = 2 * (lane % 4) + place % 2 + place % 4 // 2 * 8
    return (row // 16 * 256 + k * 16 + row % 16).flatten()


def repacked(codes):
    """[N, K/2] bytes to the kernel's [K/16, 2 N] words."""
    N, K = codes.shape[0], codes.shape[1] * 2
    nibbles = torch.stack((codes & 15, codes >> 4), -1).view(N // 16, 16, K // 16, 16).permute(2, 0, 3, 1)
    words = nibbles.reshape(-1, 1024)[:, fragment_order()].reshape(-1, 8).int()
    shifts = torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)
    return (words << shifts).sum(-1, dtype=torch.int32).view(K // 16, 2 * N)


SCALE_ORDER = torch.arange(64).view(8, 8).T.flatten().view(-1, 4)[:, [0, 2, 1, 3]].flatten()
BIAS_ORDER = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])


OPTIONS = True, False, True, False, -1, -1, -1  # all of K, no atomics, f32 sums, no zero points, tiles as it likes


class Weights:
    def __init__(self, matrix):
        E, self.N = matrix.bias.shape
        self.K = matrix.codes.shape[2] * 2
        codes = torch.stack([repacked(codes) for codes in matrix.codes])
        scales = matrix.scales.mT.reshape(-1, 64)[:, SCALE_ORDER].view(E, self.K // 32, self.N).contiguous()
        bias = matrix.bias.bfloat16().view(-1, 32)[:, BIAS_ORDER].reshape(E, self.N)
        n_multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        locks = torch.zeros(4 * n_multiprocessors, dtype=torch.int32, device="cuda")
        unused = [None] * 5  # scales of x and of all, zero points, order of K
        self.operands = codes, bias, scales.view(torch.float8_e8m0fnu), *unused, locks

    def __call__(self, x, rows, top_k, aligned, block, weights, is_weighted):
        y = x.new_empty(rows * top_k, self.N)
        sizes = block, top_k, is_weighted, E2M1, rows, self.N, self.K
        torch.ops._moe_C.moe_wna16_marlin_gemm(x, y, *self.operands, *aligned, weights, *sizes, *OPTIONS)
        return y


class Experts(Rival):
    missing = staticmethod(vllm_ops.missing)

    def __init__(self, layer):
        super().__init__(layer)
        shape = layer.shape
        I, H = -(-shape.I // 128) * 128, -(-shape.H // 256) * 256
        assert shape.limit is not None or I == shape.I  # halves would have to be padded one by one
        self.w1 = Weights(vllm_ops.gate_up(layer).padded(2 * I, H))
        self.w2 = Weights(layer.w2.padded(H, I))
        self.x = torch.nn.functional.pad(layer.x, (0, H - shape.H))

    def forward(self, x, logits):
        T, E, A = len(x), self.shape.E, self.shape.A
        weights, ids = vllm_ops.route(logits, A)
        block = next((b for b in (8, 16, 32, 48) if T * A / E / b < 0.9), 64)
        aligned = vllm_ops.align(ids, E, block)
        h = self.w1(x, T, A, aligned, block, weights, False)
        v = vllm_ops.activate(h, self.shape)
        z = self.w2(v, T * A, 1, aligned, block, weights, True)
        y = torch.empty_like(x)
        torch.ops._moe_C.moe_sum(z.view(T, A, -1), y)
        return y

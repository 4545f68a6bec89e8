"""What the machine does at its best, by PyTorch, on random data: no layer, but what a layer is measured by.

Dense products of a layer's two sizes, one of 8192 by 8192 by 8192, and a copy within the device.
"""

import torch

from layer import median_call_ms

SIDE, COPIED_BYTES, N_WEIGHTS = 8192, 1 << 30, 4


class Dense:
    ceilings = {}  # by class and state, measured once

    @staticmethod
    def missing():
        return None

    def __init__(self, layer):
        self.shape = layer.shape

    def measure(self, T, state):
        """ms of gate/up and down as one dense product each; TFLOP/s of the square product; GB/s read and written."""
        s, rows = self.shape, T * self.shape.A
        gate_up, down = self.products(rows, 2 * s.I, s.H), self.products(rows, s.H, s.I)
        ms = median_call_ms([product for pair in zip(gate_up, down) for product in pair], state) * 2
        key = type(self), state
        if key not in self.ceilings:
            square_ms = median_call_ms(self.products(SIDE, SIDE, SIDE), state)
            self.ceilings[key] = {
                "tflops": 2 * SIDE**3 / square_ms / 1e9,
                "gbs": 2 * COPIED_BYTES / self.copy_ms(state) / 1e6,
            }
        return {"ms": ms} | self.ceilings[key]

    def products(self, M, N, K):
        """As functions, each with weights of its own."""
        x, y = self.random(M, K), torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
        weights = [self.random(N, K) for _ in range(N_WEIGHTS)]
        return [lambda w=w: self.multiply(x, w, y) for w in weights]

    @staticmethod
    def random(rows, columns):
        return torch.randn(rows, columns, device="cuda").bfloat16()

    @staticmethod
    def multiply(x, w, y):
        torch.mm(x, w.T, out=y)

    @staticmethod
    def copy_ms(state):
        """The best of what PyTorch has: a copy, and an operator that reads and writes as much."""
        a = torch.randn(COPIED_BYTES // 4, device="cuda")
        b = torch.empty_like(a)
        ways = (lambda: b.copy_(a)), (lambda: torch.neg(a, out=b))
        return min(median_call_ms([way] * 4, state) for way in ways)


class DenseFp8(Dense):
    """e4m3 by e4m3, sums left in the tensor cores' accumulators."""

    def __init__(self, layer):
        super().__init__(layer)
        self.scale = torch.ones((), device="cuda")

    @staticmethod
    def random(rows, columns):
        return torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)

    def multiply(self, x, w, y):
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        torch._scaled_mm(x, w.T, self.scale, self.scale, out=y, **options)

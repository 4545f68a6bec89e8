"""One random layer of MXFP4 experts, what is right for it, and the clock: all that the rivals share.

Letters as in src/base/dims.h.  Sizes, weights and logits are drawn as src/cuda/layer_bench.c draws them.
"""

import time
from dataclasses import dataclass
from functools import cached_property

import torch

MAX_T, MAX_SETS, N_REPLAYS = 8192, 16, 15
HOT_SECONDS, RESTED_SECONDS = 0.2, 1.0


@dataclass(frozen=True)
class Shape:
    E: int
    A: int
    H: int
    I: int
    alpha: float = 1.0  # gate * sigmoid(alpha * gate) * (up + beta), gate and up clamped to the limit
    beta: float = 0.0
    limit: float | None = None


SHAPES = {
    "oss120b": Shape(128, 4, 2880, 2880, 1.702, 1.0, 7.0),
    "oss20b": Shape(32, 4, 2880, 2880, 1.702, 1.0, 7.0),
    "dsv3": Shape(256, 8, 7168, 2048),
    "v4flash": Shape(256, 6, 4096, 2048),
    "k3": Shape(896, 16, 3584, 3072),  # SITU, which nobody else has: SiLU instead
}

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Matrix:
    codes: torch.Tensor  # [E, N, K/2] bytes, the even element in the low nibble
    scales: torch.Tensor  # [E, N, K/32] bytes, E8M0
    bias: torch.Tensor  # [E, N] f32 that are bf16

    @staticmethod
    def random(E, N, K, generator):
        def integers(low, high, *shape):
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

        bias = integers(0, 256, E, N).float() / 512 - 0.25
        return Matrix(integers(0, 256, E, N, K // 2), integers(118, 122, E, N, K // 32), bias.bfloat16().float())

    def rows(self, order):
        return Matrix(self.codes[:, order], self.scales[:, order], self.bias[:, order])

    def padded(self, N, K):
        """Zeros behind the rows and columns, up to N and K."""

        def pad(x, *sizes):
            y = x.new_zeros(len(x), *sizes)
            y[tuple(slice(n) for n in x.shape)] = x
            return y

        return Matrix(pad(self.codes, N, K // 2), pad(self.scales, N, K // 32), pad(self.bias, N))

    def dense(self, e):
        """Expert e's weights, f32 [N, K]."""
        table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device="cuda")
        codes = self.codes[e]
        values = table[torch.stack((codes & 15, codes >> 4), -1).int()].view(*self.scales[e].shape, 32)
        return torch.ldexp(values, self.scales[e].int().unsqueeze(-1) - 127).flatten(1)


class Layer:
    def __init__(self, shape):
        self.shape = shape

    @staticmethod
    def generator(seed):
        return torch.Generator("cuda").manual_seed(seed)

    @cached_property
    def w1(self):
        """Rows gate 0, up 0, gate 1, ..."""
        return Matrix.random(self.shape.E, 2 * self.shape.I, self.shape.H, self.generator(1))

    @cached_property
    def w2(self):
        return Matrix.random(self.shape.E, self.shape.H, self.shape.I, self.generator(2))

    @cached_property
    def x(self):
        return torch.randn(MAX_T, self.shape.H, device="cuda", generator=self.generator(3)).bfloat16()

    @cached_property
    def logits(self):
        return torch.randn(MAX_T, self.shape.E, device="cuda", generator=self.generator(4))

    def halves(self):
        """w1 with all gates before all ups."""
        return self.w1.rows(torch.arange(2 * self.shape.I).view(-1, 2).T.flatten())

    def calls(self, T):
        """The tokens of each call that a replay makes, as slices: at least two, with logits of their own."""
        n_sets = max(2, min(MAX_SETS, MAX_T // T))
        return [slice(i * T % MAX_T, i * T % MAX_T + T) for i in range(n_sets)]

    def expert(self, e, x, beta):
        s = self.shape
        gate, up = (x.float() @ self.w1.dense(e).T + self.w1.bias[e]).view(-1, s.I, 2).unbind(-1)
        if s.limit is not None:
            gate, up = gate.clamp(max=s.limit), up.clamp(-s.limit, s.limit)
        v = gate * torch.sigmoid(s.alpha * gate) * (up + beta)
        return v @ self.w2.dense(e).T + self.w2.bias[e]

    def error(self, y, beta):
        """Relative Frobenius error of the first, a middle and the last row of y [T, H or more]."""
        rows = [0, len(y) // 2, len(y) - 1]
        values, ids = self.logits[rows].topk(self.shape.A)
        weights = values.softmax(-1)
        expected = torch.zeros(len(rows), self.shape.H, device="cuda")
        for i, row in enumerate(rows):
            for weight, e in zip(weights[i], ids[i].tolist()):
                expected[i] += weight * self.expert(e, self.x[row : row + 1], beta)[0]
        return ((y[rows, : self.shape.H].float() - expected).norm() / expected.norm()).item()


class Rival:
    """Runs a layer as somebody else does.  forward(x, logits) -> y [T, H or more] can be captured in a CUDA graph."""

    def __init__(self, layer):
        self.layer, self.shape = layer, layer.shape
        self.beta = layer.shape.beta  # another, where its activation knows only that

    @cached_property
    def x(self):
        return self.layer.x  # padded, where it wants that

    def measure(self, T, state):
        """What a result says of T tokens a call."""
        error = self.error(T)
        if not error < 0.1:
            raise ValueError(f"error {error} at T = {T}")
        return {"ms": self.ms(T, state), "error": error}

    def error(self, T):
        return self.layer.error(self.forward(self.x[:T], self.layer.logits[:T]), self.beta)

    def ms(self, T, state):
        """Median ms of a call: CUDA events around replays of a graph of calls that differ in x and logits."""
        calls = [(self.x[tokens], self.layer.logits[tokens]) for tokens in self.layer.calls(T)]
        return median_call_ms([lambda call=call: self.forward(*call) for call in calls], state)


def median_call_ms(calls, state):
    """Of the calls, which a graph holds."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    bring_into(state, graph.replay)
    return median_ms(graph.replay) / len(calls)


def bring_into(state, run):
    """The GPU: "hot" by runs that are not timed, "rested" by none, or "plain", as whatever came before left it."""
    torch.cuda.synchronize()
    if state == "rested":
        time.sleep(RESTED_SECONDS)
    end = time.monotonic() + HOT_SECONDS
    while state == "hot" and time.monotonic() < end:
        run()
        torch.cuda.synchronize()


def median_ms(run):
    times = []
    for _ in range(N_REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[3:])[N_REPLAYS // 2]

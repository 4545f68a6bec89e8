"""ggml-cuda, through ggml's C functions: the graph that llama.cpp builds for such experts, f32 in and out.

Its calls run on a stream of its own and as a CUDA graph of its own, so the host's clock times one launch of all calls.
"""

import ctypes
import os
import time

import torch

from layer import MAX_T, N_REPLAYS, Rival, bring_into

F32, MXFP4 = 0, 39
N_UNTIMED = 5  # runs node by node, until there is a graph

# Arguments and result: p pointer, i int32, l int64, z size_t, f float.
FUNCTIONS = {
    "ggml_add": "ppp p",
    "ggml_add_id": "pppp p",
    "ggml_argsort_top_k": "ppi p",
    "ggml_build_forward_expand": "pp p",
    "ggml_free": "p p",
    "ggml_get_data": "p p",
    "ggml_get_rows": "ppp p",
    "ggml_mul": "ppp p",
    "ggml_mul_mat_id": "pppp p",
    "ggml_new_graph_custom": "pzi p",
    "ggml_new_tensor_3d": "pilll p",
    "ggml_reshape_2d": "ppll p",
    "ggml_reshape_3d": "pplll p",
    "ggml_set_output": "p p",
    "ggml_soft_max": "pp p",
    "ggml_swiglu_oai": "pppff p",
    "ggml_swiglu_split": "ppp p",
    "ggml_view_2d": "ppllzz p",
    "ggml_backend_alloc_ctx_tensors": "pp p",
    "ggml_backend_buffer_free": "p p",
    "ggml_backend_cuda_init": "i p",
    "ggml_backend_free": "p p",
    "ggml_backend_get_default_buffer_type": "p p",
    "ggml_backend_graph_compute_async": "pp i",
    "ggml_backend_synchronize": "p p",
    "ggml_gallocr_alloc_graph": "pp i",
    "ggml_gallocr_free": "p p",
    "ggml_gallocr_new": "p p",
}
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "z": ctypes.c_size_t, "f": ctypes.c_float}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Library:
    """ggml's functions without their prefix."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        for name, (arguments, result) in ((name, letters.split()) for name, letters in FUNCTIONS.items()):
            function = getattr(self.library, name)
            function.argtypes, function.restype = [TYPES[a] for a in arguments], TYPES[result]
            setattr(self, name.removeprefix("ggml_"), function)
        self.library.ggml_init.argtypes, self.library.ggml_init.restype = [InitParams], ctypes.c_void_p

    def context(self):
        return self.library.ggml_init(InitParams(64 << 20, None, True))


def blocks(matrix):
    """[E, N, K/32, 17] bytes: the scale, then element j in byte j's low nibble and 16 + j in its high one."""
    E, N, n_blocks = matrix.scales.shape
    out = torch.empty(E, N, n_blocks, 17, dtype=torch.uint8, device="cuda")
    out[..., 0] = matrix.scales
    for e, codes in enumerate(matrix.codes):
        elements = torch.stack((codes & 15, codes >> 4), -1).view(N, n_blocks, 2, 16)
        out[e, ..., 1:] = elements[:, :, 0] | elements[:, :, 1] << 4
    return out


class Experts(Rival):
    @staticmethod
    def missing():
        return None if os.environ.get("GGML_CUDA") else "GGML_CUDA does not name a libggml-cuda.so"

    def __init__(self, layer):
        super().__init__(layer)
        self.g = Library(os.environ["GGML_CUDA"])
        self.backend = self.g.backend_cuda_init(0)
        self.context = self.g.context()
        arrays = self.arrays(layer)
        self.tensors = {name: self.g.new_tensor_3d(self.context, array[0], *array[1]) for name, array in arrays.items()}
        self.buffer = self.g.backend_alloc_ctx_tensors(self.context, self.backend)
        for name, (_, _, values) in arrays.items():
            self.on_device(self.tensors[name], values.shape, values.dtype).copy_(values)
        torch.cuda.synchronize()

    @staticmethod
    def arrays(layer):
        """What the graphs read, by name: ggml's type, its sizes from the innermost on, the values."""
        s, halves = layer.shape, layer.halves()
        gate, up = (halves.rows(slice(i * s.I, (i + 1) * s.I)) for i in range(2))
        arrays = {"x": (F32, (s.H, MAX_T, 1), layer.x.float()), "logits": (F32, (s.E, MAX_T, 1), layer.logits)}
        for name, matrix in {"gate": gate, "up": up, "down": layer.w2}.items():
            (E, N), K = matrix.bias.shape, matrix.codes.shape[2] * 2
            arrays[name] = MXFP4, (K, N, E), blocks(matrix)
            arrays[name + " bias"] = F32, (N, E, 1), matrix.bias
        return arrays

    def __del__(self):
        if hasattr(self, "buffer"):
            self.g.backend_buffer_free(self.buffer)
            self.g.backend_free(self.backend)

    def on_device(self, tensor, shape, dtype):
        """A tensor of ggml's as one of PyTorch's."""
        typestr = "|u1" if dtype == torch.uint8 else "<f4"
        interface = {"shape": tuple(shape), "typestr": typestr, "data": (self.g.get_data(tensor), False), "version": 3}
        return torch.as_tensor(type("Array", (), {"__cuda_array_interface__": interface})(), device="cuda")

    def call(self, context, graph, tokens):
        """Adds a call for these tokens to the graph.  The order of its nodes is that in which ggml-cuda fuses them."""
        g, t, s, T = self.g, self.tensors, self.shape, tokens.stop - tokens.start

        def rows(name, width):
            return g.view_2d(context, t[name], width, T, width * 4, tokens.start * width * 4)

        def product(name, x):
            return g.add_id(context, g.mul_mat_id(context, t[name], x, ids), t[name + " bias"], ids)

        logits = rows("logits", s.E)
        ids = g.argsort_top_k(context, logits, s.A)
        chosen = g.get_rows(context, g.reshape_3d(context, logits, 1, s.E, T), ids)
        weights = g.soft_max(context, g.reshape_2d(context, chosen, s.A, T))
        weights = g.reshape_3d(context, weights, 1, s.A, T)
        g.build_forward_expand(graph, weights)
        x = g.reshape_3d(context, rows("x", s.H), s.H, 1, T)
        up, gate = product("up", x), product("gate", x)
        if s.limit is None:
            v = g.swiglu_split(context, gate, up)
        else:
            v = g.swiglu_oai(context, gate, up, s.alpha, s.limit)
        z = g.mul(context, product("down", v), weights)
        g.build_forward_expand(graph, z)
        slots = [g.view_2d(context, z, s.H, T, s.A * s.H * 4, a * s.H * 4) for a in range(s.A)]
        for slot in slots:
            g.build_forward_expand(graph, slot)
        y = slots[0]
        for slot in slots[1:]:
            y = g.add(context, y, slot)
        g.set_output(y)
        g.build_forward_expand(graph, y)
        return y

    def compute(self, calls, n_runs, state="plain"):
        """Runs all calls as one graph; the last y as f32 [T, H], and the host's ms for each run but the first few."""
        g, context = self.g, self.g.context()
        graph = g.new_graph_custom(context, 8192, 0)
        for tokens in calls:
            y = self.call(context, graph, tokens)
        allocator = g.gallocr_new(g.backend_get_default_buffer_type(self.backend))
        if not g.gallocr_alloc_graph(allocator, graph):
            raise MemoryError("ggml's graph")

        def run():
            begin = time.perf_counter()
            g.backend_graph_compute_async(self.backend, graph)
            g.backend_synchronize(self.backend)
            return (time.perf_counter() - begin) * 1e3

        for _ in range(N_UNTIMED):
            run()
        bring_into(state, run)
        times = [run() for _ in range(n_runs)]
        result = self.on_device(y, (calls[-1].stop - calls[-1].start, self.shape.H), torch.float32).clone()
        torch.cuda.synchronize()
        g.gallocr_free(allocator)
        g.free(context)
        return result, times

    def error(self, T):
        return self.layer.error(self.compute([slice(0, T)], 0)[0], self.beta)

    def ms(self, T, state):
        calls = self.layer.calls(T)
        return sorted(self.compute(calls, N_REPLAYS, state)[1])[N_REPLAYS // 2] / len(calls)

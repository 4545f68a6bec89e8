"""OpenAI's Triton kernels (triton_kernels) in two forms, both of which fuse swiglu into the first product."""

import importlib.util
import sys
from pathlib import Path

from layer import Rival


class Experts(Rival):
    """The package of Triton 3.6, with the layouts that its own benchmark takes."""

    @staticmethod
    def missing():
        return None if importlib.util.find_spec("triton_kernels") else "no triton_kernels"

    def __init__(self, layer):
        super().__init__(layer)
        self.beta = 1.0  # what these kernels always add
        self.activation = self.swiglu()
        self.weights = {}

    def swiglu(self):
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
        from triton_kernels.swiglu import swiglu_fn

        specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
        return FusedActivation(specs, (self.shape.alpha, self.shape.limit))

    def warps(self, T):
        return 4 if T <= 512 else 8

    def route(self, logits):
        from triton_kernels.matmul_ogs import GatherIndx, RoutingData, ScatterIndx
        from triton_kernels.tensor import make_ragged_tensor_metadata
        from triton_kernels.topk import topk

        chosen = topk(logits, self.shape.A)
        by_token, by_expert = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        ragged = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, len(by_token))
        weights = chosen.vals.flatten()[by_expert]
        data = RoutingData(weights, ragged.slice_sizes, self.shape.E, self.shape.A, ragged)
        return data, GatherIndx(by_expert, by_token), ScatterIndx(by_token, by_expert)

    @staticmethod
    def swizzled(matrix, n_warps):
        from triton_kernels.matmul_ogs import PrecisionConfig
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        values, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=n_warps)
        w = convert_layout(wrap_torch_tensor(matrix.codes.mT, dtype=FP4), values, **value_options)
        scale = convert_layout(wrap_torch_tensor(matrix.scales.mT), scales, **scale_options)
        return w, matrix.bias, PrecisionConfig(weight_scale=scale)

    def forward(self, x, logits):
        from triton_kernels.matmul_ogs import matmul_ogs

        n_warps = self.warps(len(x))
        if n_warps not in self.weights:
            self.weights[n_warps] = [self.swizzled(matrix, n_warps) for matrix in (self.layer.w1, self.layer.w2)]
        (w1, bias1, precision1), (w2, bias2, precision2) = self.weights[n_warps]
        data, gather, scatter = self.route(logits)
        v = matmul_ogs(
            x, w1, bias1, data, gather_indx=gather, precision_config=precision1, fused_activation=self.activation
        )
        return matmul_ogs(v, w2, bias2, data, scatter_indx=scatter, precision_config=precision2, gammas=data.gate_scal)


class BundledExperts(Experts):
    """The older form that vLLM brings along, with the layouts and the constraint that it gives them on Hopper."""

    @staticmethod
    def missing():
        vllm = importlib.util.find_spec("vllm")  # not imported: its own copy of the kernels is enough
        folder = vllm and Path(vllm.submodule_search_locations[0]) / "third_party"
        if not folder or not (folder / "triton_kernels").is_dir():
            return "no vllm with triton_kernels"
        sys.path.insert(0, str(folder))
        return None

    def swiglu(self):
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
        from triton_kernels.swiglu import swiglu_fn

        update_opt_flags_constraints({"split_k": 1})
        specs = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"))
        return FusedActivation(specs, (self.shape.alpha, self.shape.limit), 2)

    def warps(self, T):
        return 8

    def route(self, logits):
        from triton_kernels.routing import routing

        return routing(logits, self.shape.A)

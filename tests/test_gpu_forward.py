"""The CUDA forward on a GPU against the float64 reference: errors, exact zeros, bitwise repeats, nothing past the end."""

import pytest
import torch

pytestmark = pytest.mark.gpu

CASES = {
    "short": ((1, 2, 3, 5, 127, 128, 129, 257), None, {"heads": 4, "group": 16, "top_k": 16, "extra": 5}),
    "many_single": ((1,) * 300, None, {"heads": 2, "group": 8, "top_k": 1}),
    "truncated": ((2177,), None, {"heads": 4, "group": 16, "top_k": 16}),
    "duplicates": ((300, 40), None, {"heads": 1, "group": 16, "top_k": 64}),
    "fragments": ((700, 300), [(0, 100, 200), (0, 300, 431), (1, 17, 300)], {"heads": 1, "group": 16, "top_k": 17}),
    "empty": ((0, 5, 0, 0, 130, 0), None, {"heads": 1, "group": 8, "top_k": 2}),
}


@pytest.mark.parametrize("kernel", ["simple"])
@pytest.mark.parametrize("name", CASES)
def test_forward(name, kernel):
    from test_attention import Inputs

    from msa_ext import _cuda_forward, reference_attention

    documents, fragments, options = CASES[name]
    inputs = Inputs(documents, fragments, dtype=torch.bfloat16, **options)
    inputs.q[int(inputs.cu_seqlens[-1]) :] = torch.nan
    for x in (inputs.k, inputs.v):
        x[sum(documents) :] = torch.nan
    arguments = inputs.q, inputs.k, inputs.v, inputs.topk
    layout = reference_attention.Layout(*(x.cuda() for x in vars(inputs.layout).values()))
    on_device = *(x.cuda() for x in arguments), layout, 128**-0.5, kernel
    out, lse = (x.cpu() for x in _cuda_forward.launch(*on_device))
    for got, again in zip((out, lse), _cuda_forward.launch(*on_device)):
        assert torch.equal(got, again.cpu())
    wide = (x.double() for x in arguments[:3])
    expected_out, expected_lse = reference_attention.forward(*wide, inputs.topk, inputs.layout, 128**-0.5)
    dead = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead) and not out[dead].any()
    error = (out.double() - expected_out).norm() / expected_out.norm()
    largest = (lse - expected_lse)[~dead].abs().max()
    print(f"{name}: out {error:.2e} relative L2, lse {largest:.2e} max abs")
    assert error < 4e-3 and largest < 5e-4

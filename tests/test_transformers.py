"""transformers' MiniMax M3 with `attn_implementation="msa_ext"` against its own eager path: logits and gradients."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20", reason="needs transformers >= 5.20")

from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig  # noqa: E402
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM  # noqa: E402

from msa_ext.integrations import transformers as integration  # noqa: E402


def _config(**changes):
    options = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "dense_intermediate_size": 32, "shared_intermediate_size": 16,
        "num_experts_per_tok": 2, "num_local_experts": 4, "index_n_heads": 2, "index_head_dim": 128, "index_block_size": 128,
        "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
        "initializer_range": 0.3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return MiniMaxM3VLTextConfig(**{**options, **changes})


def _models(dtype=torch.float32, **changes):
    """The same random weights on the eager path and on msa_ext."""
    integration.register(use_index_kernels=changes.pop("use_index_kernels", False))
    torch.manual_seed(0)
    eager = MiniMaxM3VLForCausalLM._from_config(_config(**changes), attn_implementation="eager").to(dtype).train()
    ours = MiniMaxM3VLForCausalLM._from_config(_config(**changes), attn_implementation="msa_ext").to(dtype).train()
    ours.load_state_dict(copy.deepcopy(eager.state_dict()))
    return eager, ours


def _tokens(batch, length):
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def _gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _agree(eager, ours, rtol):
    got, want = _gradients(ours), _gradients(eager)
    assert got.keys() == want.keys() and len(want) > 15
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= rtol * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("use_index_kernels", [False, True])
@pytest.mark.parametrize("length", [100, 600])  # all blocks chosen; 2 of 5
def test_logits_and_gradients_match_eager(length, use_index_kernels):
    eager, ours = _models(use_index_kernels=use_index_kernels)
    tokens = _tokens(2, length)
    want, got = (model(tokens, labels=tokens) for model in (eager, ours))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    want.loss.backward()
    got.loss.backward()
    _agree(eager, ours, 1e-3)


def test_bfloat16():
    """As far from float32 as the eager path in bfloat16 is, or nearer; every block is chosen, so no choice differs."""
    tokens = _tokens(1, 200)
    exact, _ = _models(mlp_layer_types=["dense", "dense"])
    eager, ours = _models(torch.bfloat16, mlp_layer_types=["dense", "dense"])
    logits = [model(tokens).logits.float() for model in (exact, eager, ours)]
    for model in (exact, eager, ours):
        model(tokens, labels=tokens).loss.backward()
    want = logits[0]
    assert (logits[2] - want).norm() <= 1.2 * (logits[1] - want).norm()
    for name, gradient in _gradients(exact).items():
        errors = [(_gradients(model)[name].float() - gradient).norm() for model in (eager, ours)]
        assert errors[1] <= 1.5 * errors[0] + 1e-2 * gradient.norm(), name


def test_right_padding():
    eager, ours = _models()
    tokens = _tokens(2, 400)
    mask = torch.ones_like(tokens)
    mask[1, 170:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    want, got = (model(tokens, attention_mask=mask, labels=labels) for model in (eager, ours))
    torch.testing.assert_close(got.logits[mask == 1], want.logits[mask == 1], rtol=1e-4, atol=1e-4)
    want.loss.backward()
    got.loss.backward()
    _agree(eager, ours, 1e-3)


def test_left_padding_is_refused():
    _, ours = _models()
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :10] = 0
    with pytest.raises(NotImplementedError, match="padding_side"):
        ours(_tokens(2, 50), attention_mask=mask)


def test_packed_documents_equal_documents_alone():
    """transformers' own eager path counts a packed document's blocks from the row's start: one document at a time."""
    eager, ours = _models()
    lengths = (300, 1, 129, 450)
    tokens = _tokens(1, sum(lengths))
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    got = ours(tokens, position_ids=position_ids, use_cache=False).logits
    want = torch.cat([eager(part).logits for part in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(0))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    _agree(eager, ours, 1e-3)


@pytest.mark.parametrize("use_index_kernels", [False, True])
def test_generation(use_index_kernels):
    eager, ours = _models(use_index_kernels=use_index_kernels)
    tokens = _tokens(2, 300)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    want, got = (model.eval().generate(tokens, **options) for model in (eager, ours))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing():
    eager, ours = _models()
    ours.gradient_checkpointing_enable()
    tokens = _tokens(1, 300)
    for model in (eager, ours):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    _agree(eager, ours, 1e-3)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 64, "rotary_dim": 32}, "head_dim: .* expects 128, got 64"),
        ({"index_block_size": 64}, "index_block_size: .* expects 128, got 64"),
        ({"index_n_heads": 1}, "index_n_heads: .* expects 2, got 1"),
        ({"index_topk_blocks": 65}, "index_topk_blocks: .* expects at most 64, got 65"),
        ({"attention_dropout": 0.1}, "attention_dropout: .* expects 0.0, got 0.1"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    _, ours = _models(**changes)
    with pytest.raises(NotImplementedError, match=message):
        ours(_tokens(1, 10))


def test_static_cache_is_refused():
    _, ours = _models()
    with pytest.raises(NotImplementedError, match="cache_implementation"):
        ours.eval().generate(_tokens(1, 10), max_new_tokens=2, cache_implementation="static")

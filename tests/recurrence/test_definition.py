"""Each recurrence against transformers' own modules, in both back ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.recurrence_case import make_case, rates, time_steps
from torch.nn import functional as F

from quire.backends import native_module
from quire.devices import device_of
from quire.recurrence import (
    CausalConvolution,
    DeltaRule,
    LinearAttention,
    Mamba1Scan,
    Mamba2Scan,
    RealGatedUnit,
    recurrence_step,
)

BACKENDS = ["python", *(["native"] if hasattr(native_module(), "RecurrenceStep") else [])]
each_backend = pytest.mark.parametrize("name", BACKENDS)
ROWS = 70
ONE = recurrence_step([0, ROWS], [0])
NEXT = recurrence_step([0, 1], [0])


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == want.shape
    rms = want.float().square().mean().sqrt()
    assert (got.float() - want.float()).abs().max() <= tolerance * rms


def modeling(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


@each_backend
def test_mamba1_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mamba = modeling("mamba")
    # Else it imports torch's associative scan, which takes seconds and is not used here.
    monkeypatch.setattr(mamba, "is_torch_greater_or_equal", lambda *_: False, raising=False)
    if not hasattr(mamba, "mamba_selective_scan"):
        pytest.skip("this transformers has it inside of a module")
    channels, size = 48, 16
    torch.manual_seed(0)
    x, dt = torch.randn(ROWS + 1, channels), time_steps(ROWS + 1, channels)
    a, d = rates(channels, size), torch.randn(channels)
    b, c = torch.randn(ROWS + 1, size), torch.randn(ROWS + 1, size)
    by_channel = [one[None, :ROWS].transpose(1, 2) for one in (x, dt, b, c)]
    want, want_state = mamba.mamba_selective_scan(
        by_channel[0], by_channel[1], a, by_channel[2], by_channel[3], d, return_last_state=True
    )
    state = torch.zeros(1, channels, size)
    got = device_of(name).recurrence.compute(
        Mamba1Scan(state, x[:ROWS], dt[:ROWS], a, b[:ROWS], c[:ROWS], d), ONE
    )
    assert_near(got, want[0].t())
    assert_near(state, want_state)
    want = mamba.mamba_selective_state_update(want_state, x[ROWS:], dt[ROWS:], a, b[ROWS:], c[ROWS:], d)
    got = device_of(name).recurrence.compute(
        Mamba1Scan(state, x[ROWS:], dt[ROWS:], a, b[ROWS:], c[ROWS:], d), NEXT
    )
    assert_near(got, want)
    assert_near(state, want_state)


@each_backend
def test_mamba2_is_that_of_transformers(name: str) -> None:
    mamba2 = modeling("mamba2")
    if not hasattr(mamba2, "mamba2_chunk_scan"):
        pytest.skip("this transformers has it inside of a module")
    heads, head_dim, groups, size = 6, 24, 2, 32
    torch.manual_seed(1)
    x, dt = torch.randn(ROWS + 1, heads, head_dim), time_steps(ROWS + 1, heads)
    b, c = torch.randn(ROWS + 1, groups, size), torch.randn(ROWS + 1, groups, size)
    a, d = rates(heads), torch.randn(heads)
    want, want_state = mamba2.mamba2_chunk_scan(
        *(one[None, :ROWS] for one in (x, dt)),
        a,
        *(one[None, :ROWS] for one in (b, c)),
        chunk_size=16,
        D=d,
        return_final_states=True,
    )
    state = torch.zeros(1, heads, head_dim, size)
    got = device_of(name).recurrence.compute(
        Mamba2Scan(state, x[:ROWS], dt[:ROWS], a, b[:ROWS], c[:ROWS], d), ONE
    )
    assert_near(got, want[0])
    assert_near(state, want_state)
    want = mamba2.mamba2_selective_state_update(
        want_state,
        x[ROWS:],
        dt[ROWS:, :, None].expand(-1, -1, head_dim),
        a[:, None, None].expand(-1, head_dim, size),
        b[ROWS:],
        c[ROWS:],
        d[:, None].expand(-1, head_dim),
    )
    got = device_of(name).recurrence.compute(
        Mamba2Scan(state, x[ROWS:], dt[ROWS:], a, b[ROWS:], c[ROWS:], d), NEXT
    )
    assert_near(got, want)
    assert_near(state, want_state)


@each_backend
@pytest.mark.parametrize("normalize", [True, False])
def test_the_gated_delta_rule_is_that_of_transformers(name: str, normalize: bool) -> None:
    qwen = modeling("qwen3_next")
    k_heads, heads, k_dim, v_dim = 2, 4, 32, 48
    torch.manual_seed(2)
    q, k = torch.randn(ROWS, k_heads, k_dim), torch.randn(ROWS, k_heads, k_dim)
    if not normalize:
        k = F.normalize(k, dim=-1)
    v, beta = torch.randn(ROWS, heads, v_dim), torch.rand(ROWS, heads)
    g, start = rates(ROWS, heads) * time_steps(ROWS, heads), torch.randn(1, heads, k_dim, v_dim)
    for rule in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        want, want_state = rule(
            *(one.repeat_interleave(heads // k_heads, dim=1)[None] for one in (q, k)),
            v[None],
            g=g[None],
            beta=beta[None],
            initial_state=start,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalize,
        )
        state = start.clone()
        got = device_of(name).recurrence.compute(
            DeltaRule(state, q, k, v, g, beta, scale=k_dim**-0.5, normalize=normalize), ONE
        )
        assert_near(got, want[0])
        assert_near(state, want_state)


@each_backend
def test_kda_is_that_of_transformers(name: str) -> None:
    kimi = modeling("kimi_linear")
    heads, k_dim, v_dim = 3, 32, 32
    torch.manual_seed(3)
    q, k, v = (torch.randn(ROWS, heads, size) for size in (k_dim, k_dim, v_dim))
    g, beta = rates(ROWS, heads, k_dim) * time_steps(ROWS, heads, k_dim), torch.rand(ROWS, heads)
    start = torch.randn(1, heads, k_dim, v_dim)
    want, want_state = kimi.recurrent_kimi_delta_attention(
        *(one[None] for one in (q, k, v, g, beta)), start, True, use_qk_l2norm_in_kernel=True
    )
    state = start.clone()
    got = device_of(name).recurrence.compute(
        DeltaRule(state, q, k, v, g, beta, scale=k_dim**-0.5, normalize=True), ONE
    )
    assert_near(got, want[0])
    assert_near(state, want_state)


@each_backend
def test_linear_attention_is_that_of_minimax(name: str) -> None:
    minimax = modeling("minimax")
    from transformers import MiniMaxConfig

    torch.manual_seed(4)
    config = MiniMaxConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_hidden_layers=2,
        block_size=32,
        layer_types=["linear_attention", "full_attention"],
    )
    module = minimax.MiniMaxLightningAttention(config, 0).eval()
    hidden = torch.randn(1, ROWS, 64)
    seen: list[torch.Tensor] = []
    module.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        module(hidden, None, None)
        qkv = F.silu(module.qkv_proj(hidden))[0].view(ROWS, 4, 48)
    q, k, v = qkv.split(16, dim=2)
    state = torch.zeros(1, 4, 16, 16)
    got = device_of(name).recurrence.compute(
        LinearAttention(state, q, k, v, -module.slope_rate.flatten()), ONE
    )
    assert_near(got.flatten(1), seen[0][0])


@each_backend
def test_rg_lru_is_that_of_recurrent_gemma(name: str) -> None:
    gemma = modeling("recurrent_gemma")
    from transformers import RecurrentGemmaConfig

    torch.manual_seed(5)
    config = RecurrentGemmaConfig(hidden_size=64, lru_width=64, num_attention_heads=4)
    module = gemma.RecurrentGemmaRglru(config).eval()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5)
    # As it is initialised: decays from 0.9 to 0.999 where the gate is open.
    wanted = torch.empty(64).uniform_(0.9**2, 0.999**2)
    module.recurrent_param.data = (0.5 * wanted.log()).neg().expm1().log()
    x = torch.randn(1, ROWS, 64)
    with torch.no_grad():
        want = module(x, torch.arange(ROWS)[None])
        heads = x[0].view(ROWS, 4, 16).transpose(0, 1)
        gates = [
            torch.sigmoid(torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(ROWS, 64))
            for weight, bias in (
                (module.input_gate_weight, module.input_gate_bias),
                (module.recurrent_gate_weight, module.recurrent_gate_bias),
            )
        ]
        log_a = -8.0 * gates[1] * F.softplus(module.recurrent_param)
    first = torch.arange(ROWS) == 0
    state = torch.full((1, 64), torch.nan)  # of whoever had the slot before
    got = device_of(name).recurrence.compute(RealGatedUnit(state, x[0] * gates[0], log_a, first=first), ONE)
    assert_near(got, want[0])
    assert_near(state, module.recurrent_states)


@each_backend
def test_the_short_convolution_is_that_of_transformers(name: str) -> None:
    qwen, lfm2 = modeling("qwen3_next"), modeling("lfm2")
    channels = 40
    torch.manual_seed(6)
    x, bias = torch.randn(ROWS, channels), torch.randn(channels)
    for width, given, activation, module in ((4, None, "silu", qwen), (3, bias, None, lfm2)):
        weight = torch.randn(channels, width)
        if not hasattr(module, "causal_conv1d_fn"):
            pytest.skip("this transformers has it inside of a module")
        want = module.causal_conv1d_fn(x.t()[None], weight, given, activation)[0].t()
        state = torch.zeros(1, width - 1, channels)
        got = device_of(name).recurrence.compute(
            CausalConvolution(state, x, weight, given, silu=activation == "silu"), ONE
        )
        assert_near(got, want)
        assert torch.equal(state[0], x[1 - width :])
        conv_state = torch.cat([torch.zeros(1, channels, 1), x[1 - width :].t()[None]], dim=-1)
        want = module.causal_conv1d_update(x[:1].t()[None], conv_state, weight, given, activation)
        got = device_of(name).recurrence.compute(
            CausalConvolution(state, x[:1], weight, given, silu=activation == "silu"), NEXT
        )
        assert_near(got, want[0].t())
        assert torch.equal(state[0], conv_state[0, :, 1:].t())


@each_backend
@pytest.mark.parametrize(
    "kind", ["mamba1", "mamba2", "delta_rule", "linear_attention", "rg_lru", "short_convolution"]
)
def test_sixteen_bits_are_widened_and_the_result_is_rounded_once(name: str, kind: str) -> None:
    kernels, step = device_of(name).recurrence, recurrence_step([0, 3, 7], [2, 5])
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case(kind, 7, dtype, 40)
        state, wide = case.state.clone(), case.state.clone()
        got = case.run(kernels, state, step)
        case.rows = {key: tensor.float() for key, tensor in case.rows.items()}
        assert got.dtype == dtype
        assert torch.equal(got, case.run(kernels, wide, step).to(dtype))
        assert torch.equal(state, wide)

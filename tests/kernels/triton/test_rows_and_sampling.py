"""Row kernels, norms, activations, sampling and its noise, against their torch twins."""

import pytest
import torch

from graphrunner.kernels import noise, reference, reference_gpu
from graphrunner.kernels.triton import activation, norms, param_rows, request_rows, sample
from graphrunner.sampling import pick


def test_norms_and_activations_match_twins(device):
    x, residual = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device)
    weight = torch.rand(40, device=device)
    torch.testing.assert_close(norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(norms.rms_norm(x, None, 1e-6), reference.rms_norm(x, None, 1e-6))
    summed = x + residual
    torch.testing.assert_close(norms.add_rms_norm(x, residual, weight, 1e-6), reference.rms_norm(summed, weight, 1e-6))
    torch.testing.assert_close(residual, summed)
    for is_gelu in (False, True):
        torch.testing.assert_close(activation.gate_mul(x, is_gelu), reference_gpu.gate_mul(x, is_gelu))
    ids = torch.tensor([2, 0, -1, 3], dtype=torch.int32, device=device)
    torch.testing.assert_close(activation.embedding(ids, x, 2.0), reference_gpu.embedding(ids, x, 2.0))


@pytest.mark.parametrize("width", [1, 3])
def test_step_reads_and_advances_the_rows(width, device):
    rows = torch.tensor([2, 0, 4, 0], dtype=torch.int32, device=device)
    last = torch.tensor([0, 11, 12, 13, 14], dtype=torch.int32, device=device)
    computed = torch.tensor([0, 3, 7, 2, 10], dtype=torch.int32, device=device)
    table = torch.randint(1, 9, (5, 3), dtype=torch.int32, device=device)
    table[0] = 0
    drafts = torch.randint(0, 50, (5, width + 1), dtype=torch.int32, device=device)
    drafts[4, 1] = -1
    counts = torch.tensor([width - 1, 0, width - 1, 0], dtype=torch.int32, device=device)
    size = 4 * width
    out = request_rows.DecodeInputs(
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int64, device=device),
        torch.empty(4, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int64, device=device),
    )
    kept = torch.empty(4, width - 1, dtype=torch.int32, device=device)
    given = request_rows.DraftInputs(drafts, counts, kept) if width > 1 else None
    request_rows.gather_decode_inputs(rows, last, computed, table, 4, out, given)
    wanted = reference_gpu.gather_decode_inputs(
        rows, last, computed, table, 4, (drafts, counts, width) if width > 1 else None
    )
    filled = (out.input_ids, out.positions, out.seq_lens, out.slot_mapping, kept)
    for value, twin in zip(filled, wanted, strict=False):
        assert value.tolist() == twin.tolist()

    tokens = torch.randint(0, 50, (4, width), dtype=torch.int32, device=device)
    num_new = torch.tensor([width, 1, 0, 2], dtype=torch.int32, device=device) if width > 1 else None
    states = []
    for advance in (request_rows.advance_rows, reference_gpu.advance_rows):
        state = (last.clone(), computed.clone(), torch.zeros(2, 16, dtype=torch.int32, device=device))
        step = torch.tensor([3], dtype=torch.int64, device=device)
        advance(rows, tokens, *state, step, num_new)
        states.append([*(part.tolist() for part in state), step.tolist()])
    assert states[0] == states[1]
    assert states[0][0][0] == 0 and states[0][1][0] == 0, "the dummy row moved"


def test_accepted_drafts_match_twin(device):
    drafts = torch.tensor([[5, 6, 7], [5, 9, 7], [-1, -1, -1], [5, 6, -1]], dtype=torch.int32, device=device)
    target = torch.tensor([5, 6, 7, 8], dtype=torch.int32, device=device).repeat(4)
    tokens, num_new = request_rows.accept_drafts(drafts, target)
    assert tokens.tolist() == [[5, 6, 7, 8], [5, 6, -1, -1], [5, -1, -1, -1], [5, 6, 7, -1]]
    twin = reference_gpu.accept_drafts(drafts, target)
    assert num_new.tolist() == [4, 2, 1, 3] == twin[1].tolist() and tokens.tolist() == twin[0].tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_greedy_takes_the_lowest_of_equals(device):
    logits = torch.zeros(3, 5000, dtype=torch.bfloat16, device=device)
    logits[1, [4999, 2049, 70]] = 3.0
    logits[2] = float("nan")
    assert sample.greedy_tokens(logits).tolist()[:2] == [0, 70]
    assert 0 <= sample.greedy_tokens(logits).tolist()[2] < 5000
    ids = torch.arange(5000, dtype=torch.int32, device=device) * 3 + 1
    assert sample.greedy_tokens(logits, ids).tolist()[:2] == [1, 211]
    assert sample.greedy_tokens(logits, ids).tolist()[2] % 3 == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_parameters_are_taken_row_by_row(device, dtype):
    whole = _rows(device, [0.0, 0.5, 1.5], [0, 4, 9], [1.0, 0.9, 0.8], [0.0, 0.1, 0.2], [1, 2**40, -3])
    rows = torch.tensor([2, 0, 1] * 50, dtype=dtype, device=device)
    taken = param_rows.take_params(whole, rows)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert getattr(taken, name).equal(getattr(whole, name)[rows.long()]), name


def _rows(device, temperature, top_k, top_p, min_p, seed) -> sample.SamplingRows:
    return sample.SamplingRows(
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
        torch.tensor(seed, dtype=torch.int64, device=device),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_matches_twin_alone_and_in_a_batch(dtype, device):
    logits = (torch.randn(6, 500, device=device) * 3).to(dtype)
    rows = _rows(
        device,
        [0.0, 1.0, 0.7, 1.3, 0.9, 1.0],
        [0, 0, 5, 0, 20, 0],
        [1.0, 1.0, 1.0, 0.8, 0.5, 1.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.2],
        [1, 2, 3, -4, 5 << 33, 6],
    )
    positions = torch.tensor([3, 9, 9, 100, 0, 1], device=device)
    fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
    tokens = sample.sample_tokens(logits, rows, positions)
    assert tokens.tolist() == reference_gpu.sample_tokens(logits, *fields, positions).tolist()
    for row in (1, 4):
        alone = sample.SamplingRows(*(field[row : row + 1] for field in fields))
        token = sample.sample_tokens(logits[row : row + 1].contiguous(), alone, positions[row : row + 1])
        assert token.tolist() == tokens[row : row + 1].tolist()


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_take_odd_logits_as_the_cpu_does(device, dtype, odd):
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(6, 300, generator=generator) * 2).to(dtype)
    logits[:, 0] = logits[:5, 170] = odd
    logits[5, 1:] = odd
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.9, 1.0, 1.0])
    top_k = torch.tensor([0, 40, 0, 20, 3, 0], dtype=torch.int32)
    top_p, min_p = torch.tensor([0.8, 0.6, 1.0, 1.0, 0.9, 0.5]), torch.tensor([0.0, 0.0, 0.1, 0.05, 0.2, 0.0])
    seeds = torch.zeros(6, dtype=torch.int64)
    finite = pick.finite_logits(logits)
    params = pick.RowParams(temperature, top_k, top_p, min_p, seeds, seeds)
    wanted = finite >= pick.filter_thresholds(finite, 1.0 / temperature[:, None], params)
    columns = (each.to(device) for each in (temperature, top_k, top_p, min_p, seeds))
    thresholds = sample.filter_thresholds(logits.to(device), sample.SamplingRows(*columns)).cpu()
    assert torch.equal(finite >= thresholds[:, None], wanted)


def test_filters_keep_what_the_twin_keeps(device):
    logits = (torch.randn(4, 300, device=device) * 2).to(torch.bfloat16)
    rows = _rows(device, [1.0, 0.5, 2.0, 1.0], [1, 10, 0, 300], [1.0, 0.9, 0.3, 1.0], [0.0, 0.0, 0.0, 0.1], [0] * 4)
    thresholds = sample.filter_thresholds(logits, rows)
    for i in range(4):
        wanted = reference_gpu.filter_threshold(
            logits[i], *(float(f[i]) if f is not rows.top_k else int(f[i]) for f in
                         (rows.temperature, rows.top_k, rows.top_p, rows.min_p))
        )  # fmt: skip
        assert (logits[i] >= thresholds[i]).tolist() == (logits[i].double() >= wanted - 1e-6).tolist()


def test_kernel_noise_has_the_twins_bits(device):
    """Uniform logits expose the noise: the sampled token is the arg-max of the twin's noise."""
    seeds = torch.arange(-4, 4, device=device) * 7919
    positions = torch.arange(8, device=device) * 1000
    rows = _rows(device, [1.0] * 8, [0] * 8, [1.0] * 8, [0.0] * 8, seeds.tolist())
    tokens = sample.sample_tokens(torch.zeros(8, 3000, device=device), rows, positions)
    wanted = noise.gumbel_noise(seeds, positions, torch.arange(3000, device=device)).argmax(-1)
    assert tokens.tolist() == wanted.tolist()


def test_noise_is_gumbel():
    draws = noise.gumbel_noise(torch.arange(64), torch.arange(64), torch.arange(4096)).double()
    assert torch.isfinite(draws).all()
    assert abs(draws.mean() - 0.5772) < 0.01 and abs(draws.var() - 1.6449) < 0.03
    bits = torch.tensor([0, 1, 2**31, 2**32 - 1])
    v = torch.clamp((bits.double() + 0.5) / 2**32, max=noise.LARGEST_UNIFORM)
    torch.testing.assert_close(
        noise.gumbel_from_bits(bits).double(), -torch.log(-torch.log1p(-v)), atol=1e-5, rtol=1e-5
    )


def test_log_sums_do_not_depend_on_the_rows_beside(device):
    logits = torch.randn(5, 4500, device=device) * 4
    logits[1] = -torch.inf
    logits[2, 7:] = -torch.inf
    logits[3, 0] = 1e30
    sums = sample.row_log_sums(logits)
    torch.testing.assert_close(sums, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    for row in range(5):
        assert torch.equal(sample.row_log_sums(logits[row : row + 1]), sums[row : row + 1])
    assert sample.row_log_sums(logits[:0]).shape == (0,)

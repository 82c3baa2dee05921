"""Plain torch twins of the kernels only the GPU path has: device-resident rows, sampling inside a graph, tree masks.

Shape legend: R requests or rows, W query width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from graphrunner.kernels.noise import gumbel_noise


def embedding(input_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of table [V, K] for ids [T], times scale; ids out of range read row 0."""
    is_known = (input_ids >= 0) & (input_ids < table.shape[0])
    rows = F.embedding(torch.where(is_known, input_ids, 0).long(), table)
    return (rows.float() * scale).to(table.dtype)


def gate_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * up in float32 of gate_up [T, 2N]; see triton.activation.gate_mul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    return (activated * up).to(gate_up.dtype)


def gather_decode_inputs(
    request_rows: Tensor,
    last_token: Tensor,
    num_computed: Tensor,
    page_table: Tensor,
    page_size: int,
    drafts: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, ...]:
    """Inputs of a uniform step; see triton.request_rows.gather_decode_inputs.

    Args:
        drafts: draft table int32 [num_rows, max_drafts], num_drafts int32 [R], W.

    Returns:
        input_ids int32 [R * W], positions int64 [R * W], seq_lens int32 [R], slot_mapping int64 [R * W]; and, with
        drafts, draft_tokens int32 [R, W - 1].
    """
    rows = request_rows.long()
    ids = last_token[rows].unsqueeze(1)
    kept: tuple[Tensor, ...] = ()
    if drafts is not None:
        table, num_drafts, width = drafts
        place = torch.arange(width - 1, device=ids.device)
        kept = (torch.where(place < num_drafts.unsqueeze(1), table[rows, : width - 1], -1),)
        ids = torch.cat((ids, kept[0].clamp(min=0)), dim=1)
    width = ids.shape[1]
    positions = num_computed[rows].long().unsqueeze(1) + torch.arange(width, device=ids.device)
    column = positions // page_size
    has_page = column < page_table.shape[1]
    pages = page_table[rows].long().gather(1, torch.where(has_page, column, 0))
    slots = torch.where(has_page, pages, 0) * page_size + positions % page_size
    return ids.flatten(), positions.flatten(), num_computed[rows] + width, slots.flatten(), *kept


def accept_drafts(draft_tokens: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int32 [R, W] and their number int32 [R]; see triton.request_rows.accept_drafts."""
    num_requests, num_drafts = draft_tokens.shape
    target = target_ids.view(num_requests, num_drafts + 1)
    is_same = F.pad(draft_tokens == target[:, :-1], (1, 0), value=True)
    is_kept = is_same.to(torch.int32).cumprod(dim=1)
    return torch.where(is_kept > 0, target, -1).to(torch.int32), is_kept.sum(dim=1).to(torch.int32)


def advance_rows(
    request_rows: Tensor,
    tokens: Tensor,
    last_token: Tensor,
    num_computed: Tensor,
    output_ring: Tensor,
    step_counter: Tensor,
    num_new: Tensor | None = None,
) -> None:
    """Advance the device rows in place; see triton.request_rows.advance_rows."""
    tokens = tokens.reshape(request_rows.shape[0], -1)
    counts = torch.ones_like(request_rows) if num_new is None else num_new
    place = torch.arange(tokens.shape[1], device=tokens.device)
    kept = torch.where(place < counts.unsqueeze(1), tokens, -1)
    output_ring[step_counter % output_ring.shape[0], : tokens.numel()] = kept.flatten()
    is_real = request_rows != 0
    rows = request_rows[is_real].long()
    newest = tokens.gather(1, (counts.long() - 1).clamp(min=0).unsqueeze(1)).squeeze(1)[is_real]
    last_token[rows] = torch.where(counts[is_real] > 0, newest, last_token[rows])
    num_computed[rows] += counts[is_real]
    step_counter += 1


def filter_threshold(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit one row's filters keep (top-k, then top-p renormalised, then min-p); ties are kept.

    Args:
        logits: float [V].
        temperature: above 0.
        top_k, top_p, min_p: 0, 1 and 0 keep all.
    """
    values = logits.double()
    threshold = float("-inf")
    if 0 < top_k < values.shape[0]:
        threshold = float(values.topk(top_k).values[-1])
    if top_p < 1.0:
        kept, _ = torch.where(values >= threshold, values, float("-inf")).sort(descending=True)
        mass = (kept / temperature).softmax(0).cumsum(0)
        threshold = float(kept[int((mass < top_p).sum())])
    if min_p > 0.0:
        threshold = max(threshold, float(values.max() + temperature * torch.log(torch.tensor(min_p).double())))
    return min(threshold, float(values.max()))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token a row; see triton.sample.sample_tokens. Returns int32 [R]."""
    values = logits.float()
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[1], device=logits.device))
    for row in range(logits.shape[0]):
        heat = float(temperature[row])
        if heat > 0.0:
            threshold = filter_threshold(values[row], heat, int(top_k[row]), float(top_p[row]), float(min_p[row]))
            inverse = torch.reciprocal(temperature[row].float())
            noisy = values[row] * inverse + noise[row]
            values[row] = torch.where(values[row] >= threshold, noisy, float("-inf"))
    return values.argmax(-1).to(torch.int32)


def tree_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_old: Tensor, v_old: Tensor, tree_mask: Tensor, scale: float
) -> Tensor:
    """Verify attention of one request: every query sees all old keys, and of the new ones what the tree allows.

    Args:
        q: float [W, Hq, D].
        k_new, v_new: float [W, Hk, D].
        k_old, v_old: float [S, Hk, D].
        tree_mask: [W, W]; nonzero [i, j] lets query i see new key j.
        scale: multiplies the scores.

    Returns:
        float32 [W, Hq, D].
    """
    group = q.shape[1] // k_new.shape[1]
    keys = torch.cat((k_old, k_new)).float().repeat_interleave(group, 1)
    values = torch.cat((v_old, v_new)).float().repeat_interleave(group, 1)
    old = torch.ones(q.shape[0], k_old.shape[0], dtype=torch.bool, device=q.device)
    is_visible = torch.cat((old, tree_mask != 0), dim=1)
    scores = torch.einsum("whd,shd->hws", q.float(), keys) * scale
    weights = torch.where(is_visible, scores, float("-inf")).softmax(-1)
    return torch.einsum("hws,shd->whd", weights, values)

"""rope and rope_3d: bit for bit the chains that models run, in every layout, and errors where those have errors."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from diffkern.ops import expand_axes, rope, rope_3d
from diffkern.providers.registry import NoProviderError
from tests.ops.checks import leaves_alone
from tests.ops.layouts import make
from tests.ops.reference import EXACT_HALF, INTERPRETED
from tests.ops.rotation import angles, axis_tables, chain, random

PAIRINGS = ("interleaved", "half")
ARITHMETICS = ("float32", "float64", "input")
#: Triton's interpreter is slow: there, one half dtype and float32 stand for all.
DTYPES = (torch.float32, *EXACT_HALF)
FEW_DTYPES = DTYPES[-1:] if INTERPRETED else DTYPES


def check(x: Tensor, cos: Tensor, sin: Tensor, provider: str, *, rotary: int | None = None, **options: str) -> Tensor:
    """Calls rope and asserts that it is the chain, bit for bit, laid out like the input and leaving that alone."""
    with leaves_alone(x, cos, sin):
        y = rope(x, cos, sin, rotary_dim=rotary, provider=provider, **options)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, chain(x, cos, sin, rotary=rotary, **options))
    return y


# --- cases ----------------------------------------------------------------------------------------------


def test_neighbours_and_halves_are_different_pairings(provider: str, device: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    cos, sin = torch.zeros(4, device=device), torch.ones(4, device=device)
    assert rope(x, cos, sin, provider=provider).tolist() == [-2, 1, -4, 3]
    assert rope(x, cos, sin, pairing="half", provider=provider).tolist() == [-3, -4, 1, 2]
    compact = cos[:2], sin[:2]
    assert rope(x, *compact, provider=provider).tolist() == [-2, 1, -4, 3]
    assert rope(x, *compact, pairing="half", provider=provider).tolist() == [-3, -4, 1, 2]


def test_every_sample_has_its_own_table(provider: str, device: str) -> None:
    x = random(2, 3, 2, 4, device=device)
    cos, sin = angles(2, 3, 1, 4, device=device)
    y = check(x, cos, sin, provider)
    assert torch.equal(y[1:], rope(x[1:], cos[1:], sin[1:], provider=provider))
    changed = cos.clone()
    changed[1] += 1
    other = rope(x, changed, sin, provider=provider)
    assert torch.equal(other[0], y[0])
    assert not torch.equal(other[1], y[1])


def test_tables_broadcast_as_eager_does_and_fail_where_it_does(provider: str, device: str) -> None:
    x = random(4, 3, 2, 8, device=device)
    cos, sin = angles(1, 3, 1, 8, device=device)
    check(x, cos, sin, provider)
    check(x, cos, sin.expand(4, -1, -1, -1), provider)
    check(x, cos.repeat(4, 1, 1, 1), sin.expand(4, 3, 2, 8), provider)
    check(x, cos[:, :1], sin, provider)
    check(x, cos[:, :1], sin[0, 0, 0], provider)
    check(x, cos.expand(4, 3, 1, 8).transpose(0, 1).contiguous().transpose(0, 1), sin, provider)
    with pytest.raises(ValueError, match=r"cos of shape .* does not broadcast"):
        rope(x, cos.repeat(2, 1, 1, 1), sin, provider=provider)
    long = random(4, 32, 2, 8, device=device)
    short = angles(1, 16, 1, 8, device=device)
    with pytest.raises(ValueError, match="does not broadcast"):
        rope(long, *short, provider=provider)
    with pytest.raises(ValueError, match=r"sin of shape .* does not broadcast"):
        rope(x[:1], cos, sin.repeat(4, 1, 1, 1), provider=provider)


# --- exact ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_quarter_of_a_million_elements_are_bit_equal_to_the_chain(
    pairing: str, arithmetic: str, provider: str, device: str
) -> None:
    tokens = 4 if INTERPRETED else 64
    for dtype in (torch.float32, *EXACT_HALF, torch.float64):
        x = random(2, tokens, 16, 128, device=device, dtype=dtype)
        check(x, *angles(tokens, 1, 128, device=device), provider, pairing=pairing, arithmetic=arithmetic)
        check(x, *angles(tokens, 1, 64, device=device), provider, pairing=pairing, arithmetic=arithmetic)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_the_angles_of_a_pair_may_differ(pairing: str, provider: str, device: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    cos = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    sin = torch.tensor([10.0, 20.0, 30.0, 40.0], device=device)
    expected = [[-19.0, 24.0, -111.0, 136.0]] if pairing == "interleaved" else [[-29.0, -76.0, 39.0, 96.0]]
    assert rope(x, cos, sin, pairing=pairing, provider=provider).tolist() == expected


@pytest.mark.parametrize("head_dim", [2, 6, 40, 64, 72, 80, 96, 112, 128, 256])
def test_every_head_dim_is_bit_equal_to_the_chain(head_dim: int, provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = random(1, 3, 5, head_dim, device=device, dtype=dtype)
        for pairing in PAIRINGS:
            check(x, *angles(3, 1, head_dim, device=device), provider, pairing=pairing)
            check(x, *angles(3, 1, head_dim // 2, device=device), provider, pairing=pairing)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_only_the_first_elements_are_rotated_if_so_asked(pairing: str, provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = random(2, 3, 4, 64, device=device, dtype=dtype)
        for rotary in (2, 16, 30, 32, 48):
            check(x, *angles(3, 1, rotary, device=device), provider, rotary=rotary, pairing=pairing)
            check(x, *angles(3, 1, rotary // 2, device=device), provider, rotary=rotary, pairing=pairing)


def test_tables_may_be_narrow_strided_misaligned_or_of_different_kinds(provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = random(2, 6, 3, 64, device=device, dtype=dtype)
        cos, sin = angles(6, 1, 64, device=device)
        for table_dtype in (*EXACT_HALF, torch.float64):
            check(x, cos.to(table_dtype), sin.to(table_dtype), provider)
        check(x, cos, sin[..., ::2], provider)
        check(x, cos[..., 1::2], sin[..., ::2], provider)
        check(x, cos.transpose(0, 2).contiguous().transpose(0, 2), sin, provider)
        odd = torch.empty(1 + cos.numel(), device=device)[1:].view_as(cos).copy_(cos)
        check(x, odd, sin, provider)
        check(x, odd[..., :32], sin[..., :32], provider, pairing="half")


@pytest.mark.parametrize("layout", ["heads_of_qkv", "heads_first", "every_second_row", "offset_by_one", "four_loops"])
def test_strided_inputs_are_read_in_place(layout: str, provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = make(layout, 2, 3, 32, dtype, device)
        for pairing in PAIRINGS:
            check(x, *angles(*x.shape[1:], device=device), provider, pairing=pairing)
            check(x, *angles(x.shape[-2], 32, device=device), provider, pairing=pairing)


def test_many_dimensions_of_input_and_tables_are_told_apart(provider: str, device: str) -> None:
    x = random(2, 3, 4, 3, 4, 16, device=device)[:, :, ::2, :, ::2]
    for shape in ((3, 1, 3, 1, 16), (2, 1, 2, 1, 2, 8)):
        check(x, *angles(*shape, device=device), provider)
    y = rope(x, *angles(2, 1, 3, 1, 16, device=device), tokens=(1, 2), provider=provider)
    assert torch.equal(y[:, 1:], chain(x[:, 1:], *angles(2, 1, 3, 1, 16, device=device)))
    assert torch.equal(y[:, :1], x[:, :1])


def test_a_flat_row_of_all_heads_has_flat_tables(provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = random(2, 3, 2048, device=device, dtype=dtype)
        for pairing in PAIRINGS:
            check(x, *angles(2, 3, 2048, device=device), provider, pairing=pairing)


def test_complex_tables_are_one_angle_per_pair(provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        x = random(2, 5, 3, 64, device=device, dtype=dtype)
        cos, sin = angles(5, 1, 32, device=device, dtype=torch.float64)
        double = torch.complex(cos, sin)
        single = double.to(torch.complex64)
        expected = chain(x, single.real, single.imag)
        assert torch.equal(rope(x, single, provider=provider), expected)
        expected = chain(x, cos, sin, arithmetic="float64")
        assert torch.equal(rope(x, double, arithmetic="float64", provider=provider), expected)
    backwards = rope(x, single.conj(), provider=provider)
    assert torch.equal(backwards, chain(x, single.real, -single.imag))
    assert torch.equal(backwards, rope(x, single.real, single.conj().imag, provider=provider))
    with pytest.raises(TypeError, match="the table must be complex"):
        rope(x, cos, provider=provider)


def test_tokens_outside_the_slice_are_copied(provider: str, device: str) -> None:
    for dtype in FEW_DTYPES:
        for seq_dim, shape in ((1, (2, 9, 3, 64)), (2, (2, 3, 9, 64)), (-2, (2, 3, 9, 64)), (0, (9, 2, 1, 64))):
            x = random(*shape, device=device, dtype=dtype)
            dim = seq_dim % 4
            for start, length in ((0, 5), (4, 5), (2, 3), (3, 1), (5, 0), (0, 9))[:: 3 if INTERPRETED else 1]:
                cos, sin = angles(*(length if d == dim else 1 for d in range(3)), 64, device=device)
                y = rope(x, cos, sin, tokens=(start, length), seq_dim=seq_dim, provider=provider)
                expected = x.clone()
                part = x.narrow(dim, start, length)
                expected.narrow(dim, start, length).copy_(chain(part, cos, sin))
                assert torch.equal(y, expected)


def test_a_row_does_not_depend_on_the_batch_and_repeats_are_bit_equal(provider: str, device: str) -> None:
    x = random(3, 5, 4, 128, device=device, dtype=torch.float16)
    cos, sin = angles(5, 1, 128, device=device)
    y = rope(x, cos, sin, provider=provider)
    assert torch.equal(y, rope(x, cos, sin, provider=provider))
    assert torch.equal(y[1:2, 2:3, 1:2], rope(x[1:2, 2:3, 1:2].clone(), cos[2:3], sin[2:3], provider=provider))


def test_inputs_without_elements_give_results_without_elements(provider: str, device: str) -> None:
    for shape in ((0, 3, 8), (2, 0, 8), (2, 3, 0)):
        x = torch.empty(shape, device=device)
        y = rope(x, *angles(shape[-1], device=device), provider=provider)
        assert y.shape == x.shape
    x = torch.empty(2, 0, 3, 8, device=device)
    assert rope_3d(x, *axis_tables((2, 2, 2), (2, 1, 1), device), grid=(0, 2, 2), provider=provider).shape == x.shape


def test_infinities_and_nans_go_where_the_chain_takes_them(provider: str, device: str) -> None:
    x = random(4, 16, device=device)
    x[0, 3], x[1, 4], x[2, 15] = torch.inf, torch.nan, -torch.inf
    cos, sin = angles(4, 16, device=device)
    for pairing in PAIRINGS:
        y = rope(x, cos, sin, pairing=pairing, provider=provider)
        assert torch.equal(y.nan_to_num(7.0), chain(x, cos, sin, pairing).nan_to_num(7.0))


def test_many_rows_of_which_little_turns(provider: str, device: str) -> None:
    """The two parts of such a row are padded one by one; their sum is no power of two."""
    for head_dim, rotary in ((48, 2), (40, 8)):
        x = random(300, head_dim, device=device)
        check(x, *angles(300, rotary, device=device), provider, rotary=rotary)


@hypothesis.settings(max_examples=15 if INTERPRETED else 120)
@hypothesis.given(data=st.data())
def test_any_shape_and_broadcast_is_bit_equal_to_the_chain(data: st.DataObject, provider: str, device: str) -> None:
    rank = data.draw(st.integers(1, 5))
    lead = data.draw(st.lists(st.integers(1, 4), min_size=rank - 1, max_size=rank - 1))
    head_dim = data.draw(st.sampled_from([2, 4, 8, 10, 16, 24, 32, 48, 64]))
    rotary = data.draw(st.sampled_from(sorted({2, head_dim // 2 // 2 * 2 or 2, head_dim})))
    dtype = data.draw(st.sampled_from(DTYPES))
    order = data.draw(st.permutations(range(rank)))
    x = random(*[[*lead, head_dim][dim] for dim in order], device=device, dtype=dtype)
    x = x.permute([order.index(dim) for dim in range(rank)])
    tables = []
    for seed in (1, 2):
        skip = data.draw(st.integers(0, rank - 1))
        shape = [data.draw(st.sampled_from([1, size])) for size in lead[skip:]]
        tables.append(angles(*shape, data.draw(st.sampled_from([rotary, rotary // 2])), seed=seed, device=device)[0])
    y = rope(
        x, *tables, rotary_dim=rotary, pairing=(pairing := data.draw(st.sampled_from(PAIRINGS))),
        arithmetic=(arithmetic := data.draw(st.sampled_from(ARITHMETICS))), provider=provider,
    )  # fmt: skip
    assert torch.equal(y, chain(x, *tables, pairing=pairing, arithmetic=arithmetic, rotary=rotary))
    assert y.stride() == torch.empty_like(x).stride()


# --- tables of axes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(
    ("order", "widths", "pad"),
    [("blocked", (12, 10, 10), 0), ("blocked", (5, 20, 6), 1), ("alternating", (10, 10, 10), 2)],
)
def test_tables_of_axes_equal_the_full_table(
    order: str, widths: tuple[int, ...], pad: int, pairing: str, provider: str, device: str
) -> None:
    grid = (2, 3, 4)
    for dtype in FEW_DTYPES:
        for heads in (1, 3):
            cos, sin = axis_tables((2, 5, 4), tuple(heads * width for width in widths), device)
            options = {"order": order, "front_pad": heads * pad}
            positions = torch.cartesian_prod(*(torch.arange(size, device=device) for size in grid))
            full = expand_axes(cos, sin, grid=grid, **options)
            assert torch.equal(full[0], expand_axes(cos, sin, coords=positions, **options)[0])
            shaped = [table.view(24, heads, 32) for table in full]
            x = random(2, 24, 3, 64, device=device, dtype=dtype)
            options |= {"pairing": pairing, "provider": provider}
            expected = rope(x, *shaped, pairing=pairing, provider=provider)
            assert torch.equal(expected, chain(x, *shaped, pairing))
            assert torch.equal(rope_3d(x, cos, sin, grid=grid, **options), expected)
            for index in (torch.int32, torch.int64):
                assert torch.equal(rope_3d(x, cos, sin, coords=positions.to(index), **options), expected)
            swapped = rope_3d(x.transpose(1, 2), cos, sin, grid=grid, seq_dim=2, **options)
            assert torch.equal(swapped.transpose(1, 2), expected)


def test_samples_may_have_their_own_coordinates_and_tokens_their_slice(provider: str, device: str) -> None:
    x = random(2, 9, 3, 32, device=device)
    cos, sin = axis_tables((4, 3, 5), (4, 6, 6), device)
    coords = torch.stack([torch.randint(0, size, (2, 6)) for size in (4, 3, 5)], -1).to(device)
    full = [table.unsqueeze(2) for table in expand_axes(cos, sin, coords=coords)]
    y = rope_3d(x, cos, sin, coords=coords, tokens=(2, 6), provider=provider)
    assert torch.equal(y, rope(x, *full, tokens=(2, 6), provider=provider))
    assert torch.equal(y[:, :2], x[:, :2])
    y = rope_3d(x, cos, sin, coords=coords.mT.contiguous().mT, tokens=(2, 6), provider=provider)
    assert torch.equal(y, rope(x, *full, tokens=(2, 6), provider=provider))
    shared = rope_3d(x[:, 2:8], cos, sin, coords=coords[:1], provider=provider)
    assert torch.equal(shared, rope(x[:, 2:8], *(table[0] for table in full), provider=provider))


@pytest.mark.parametrize("axes", [1, 2, 4])
def test_there_may_be_one_to_four_axes(axes: int, provider: str, device: str) -> None:
    grid = (3, 2, 2, 3)[:axes]
    tokens = torch.Size(grid).numel()
    x = random(1, tokens, 2, 8 * axes, device=device)
    for order in ("blocked", "alternating"):
        cos, sin = axis_tables(grid, (4,) * axes, device)
        full = [table.unsqueeze(1) for table in expand_axes(cos, sin, grid=grid, order=order)]
        y = rope_3d(x, cos, sin, grid=grid, order=order, provider=provider)
        assert torch.equal(y, rope(x, *full, provider=provider))


def test_a_coordinate_outside_its_table_is_not_read(provider: str, device: str) -> None:
    x = random(1, 3, 1, 8, device=device)
    cos, sin = axis_tables((2, 2), (2, 2), device)
    coords = torch.tensor([[0, 1], [1, 2], [-1, 0]], device=device)
    if device == "cpu":
        with pytest.raises(IndexError, match="axis 0 is outside its table of 2 positions"):
            rope_3d(x, cos, sin, coords=coords, provider=provider)
        return
    y = rope_3d(x, cos, sin, coords=coords, provider=provider)
    assert y.isnan().tolist() == [[[[False] * 8], [[False] * 4 + [True] * 4], [[True] * 4 + [False] * 4]]]


# --- errors ---------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(device: str) -> None:
    x = random(2, 6, 3, 8, device=device)
    cos, sin = angles(6, 1, 8, device=device)
    with pytest.raises(ValueError, match="unknown pairing 'neox'"):
        rope(x, cos, sin, pairing="neox")
    with pytest.raises(ValueError, match="unknown arithmetic 'float16'"):
        rope(x, cos, sin, arithmetic="float16")
    with pytest.raises(ValueError, match="7 elements cannot be rotated in pairs"):
        rope(x, cos, sin, rotary_dim=7)
    with pytest.raises(ValueError, match="10 elements cannot be rotated in pairs in a row of 8"):
        rope(x, cos, sin, rotary_dim=10)
    with pytest.raises(ValueError, match="last dimension must be 8 or 4"):
        rope(x, cos[..., :6], sin)
    with pytest.raises(ValueError, match="tokens 4 to 8 are not all among the 6"):
        rope(x, cos[:4], sin[:4], tokens=(4, 4))
    with pytest.raises(ValueError, match="seq_dim 3 is no leading dimension"):
        rope(x, cos, sin, tokens=(0, 6), seq_dim=3)
    with pytest.raises(ValueError, match="cos is on meta"):
        rope(x, cos.to("meta"), sin)
    with pytest.raises(TypeError, match=r"floating point input, got torch\.int64"):
        rope(x.long(), cos, sin)
    with pytest.raises(TypeError, match=r"cos is torch\.int64"):
        rope(x, cos.long(), sin)
    with pytest.raises(ValueError, match="at least one dimension"):
        rope(torch.tensor(1.0, device=device), cos, sin)


def test_bad_tables_of_axes_are_named(device: str) -> None:
    x = random(2, 6, 3, 8, device=device)
    cos, sin = axis_tables((2, 3), (2, 2), device)
    coords = torch.zeros(6, 2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="either the grid or the coordinates"):
        rope_3d(x, cos, sin)
    with pytest.raises(ValueError, match="either the grid or the coordinates"):
        rope_3d(x, cos, sin, grid=(2, 3), coords=coords)
    with pytest.raises(ValueError, match=r"a grid of \(3, 3\)|3 positions along axis 0, its table 2"):
        rope_3d(x, cos, sin, grid=(3, 3))
    with pytest.raises(ValueError, match="is not one of 6 tokens and 2 axes"):
        rope_3d(x, cos, sin, grid=(1, 3))
    with pytest.raises(ValueError, match="the axes have 5 pairs, 1 of them padding: 4 are rotated, or 12 in all heads"):
        rope_3d(x, cos, sin, grid=(2, 3), front_pad=1)
    with pytest.raises(ValueError, match="got 2 tables of cosines and 1 of sines"):
        rope_3d(x, cos, sin[:1], grid=(2, 3))
    with pytest.raises(ValueError, match="unknown order 'mixed'"):
        rope_3d(x, cos, sin, grid=(2, 3), order="mixed")
    with pytest.raises(ValueError, match="alternate only if"):
        rope_3d(x, *axis_tables((2, 3), (1, 3), device), grid=(2, 3), order="alternating")
    with pytest.raises(ValueError, match="do not fit 6 tokens and 2 axes"):
        rope_3d(x, cos, sin, coords=coords[:5])
    with pytest.raises(TypeError, match=r"int32 or int64, got torch\.float32"):
        rope_3d(x, cos, sin, coords=coords.float())


def test_a_named_provider_is_the_one_that_computes(device: str) -> None:
    x = random(2, 8, device=device)
    with pytest.raises(ValueError, match="unknown provider 'cuda'"):
        rope(x, *angles(8, device=device), provider="cuda")
    if device == "cpu" and not INTERPRETED:
        with pytest.raises(NoProviderError, match="triton"):
            rope(x, *angles(8, device=device), provider="triton")

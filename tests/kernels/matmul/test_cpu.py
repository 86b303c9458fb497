"""Products on a CPU: a row's bits are its own, for every batch, place, layout, dtype and thread."""

from __future__ import annotations

import threading

import pytest
import torch

from nondet.core.compare import error_against, identical
from nondet.core.inputs import generator, make
from nondet.core.launch import listen
from nondet.errors import UserError
from nondet.kernels import reference, stock
from nondet.kernels.matmul import cpu as cpu_matmul
from tests.build import accuracy_bound

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 77, 130)


def operands(dtype: torch.dtype, k: int, n: int, kind: str = "bell") -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(1, "cpu")
    return make(kind, (max(ROWS), k), dtype, "cpu", rng), make("bell", (n, k), dtype, "cpu", rng) / 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bell", "cancel"])
def test_a_row_does_not_depend_on_the_batch(threads: int, dtype: torch.dtype, kind: str) -> None:
    """Every row, in every batch that begins at any place, has the bits it has in the largest batch."""
    x, weight = operands(dtype, 72, 200, kind)
    whole = cpu_matmul.linear(x, weight)
    for rows in ROWS:
        for start in (0, 1, max(ROWS) - rows):
            assert identical(cpu_matmul.linear(x[start : start + rows], weight), whole[start : start + rows])


@pytest.mark.parametrize("columns", [1, 2, 6, 9, 16])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_narrow_operands_are_no_exception(columns: int, layout: str) -> None:
    """A library that has no invariant tile for few columns (MKL in float32) is given more of them."""
    x, weight = operands(torch.float32, 33, columns)
    b = weight.t() if layout == "transposed" else weight.t().contiguous()
    whole = cpu_matmul.matmul(x, b)
    assert error_against(whole, reference.matmul(x, b)).relative_norm <= accuracy_bound(torch.float32, 33)
    for rows in ROWS:
        for start in (0, max(ROWS) - rows):
            assert identical(cpu_matmul.matmul(x[start : start + rows], b), whole[start : start + rows])


def test_stock_does_depend_on_it() -> None:
    """The same question put to torch.mm has more than one answer on this CPU, or the test above shows nothing."""
    x, weight = operands(torch.float32, 256, 512, "cancel")
    whole = stock.linear(x, weight)
    apart = stock.linear(x[:, ::2], weight[:, ::2]) + stock.linear(x[:, 1::2], weight[:, 1::2])
    assert not identical(apart, whole)  # these inputs show another order along K, on any CPU
    if all(identical(stock.linear(x[:rows], weight), whole[:rows]) for rows in ROWS):
        pytest.skip("torch's own float32 product is batch-invariant on this CPU at K 256, N 512, M 1 to 130")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bell", "outlier"])
@pytest.mark.parametrize(("k", "n"), [(1, 7), (2, 64), (33, 1), (128, 96), (1000, 40)])
def test_values(dtype: torch.dtype, kind: str, k: int, n: int) -> None:
    """As near to float64 as one rounding and a float32 accumulation allow, odd shapes too."""
    x, weight = operands(dtype, k, n, kind)
    bound = accuracy_bound(dtype, k)
    assert error_against(cpu_matmul.linear(x, weight), reference.linear(x, weight)).relative_norm <= bound
    b = weight.t().contiguous()
    assert error_against(cpu_matmul.matmul(x, b), reference.matmul(x, b)).relative_norm <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_of_the_left_operand_do_not_matter(dtype: torch.dtype) -> None:
    """A strided, a transposed, a misaligned and an expanded batch give the bits of a contiguous one."""
    x, weight = operands(dtype, 72, 64)
    right = cpu_matmul.linear(x, weight)
    strided = torch.empty(x.shape[0], 2 * x.shape[1], dtype=dtype)[:, ::2].copy_(x)
    assert identical(cpu_matmul.linear(strided, weight), right)
    assert identical(cpu_matmul.linear(x.t().contiguous().t(), weight), right)
    shifted = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(x.shape).copy_(x)
    assert identical(cpu_matmul.linear(shifted, weight), right)
    assert identical(cpu_matmul.linear(x[:1].expand(5, -1), weight), right[:1].expand(5, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias(dtype: torch.dtype) -> None:
    """A bias is added, and the rows stay independent."""
    x, weight = operands(dtype, 64, 48)
    bias = make("bell", (48,), dtype, "cpu", generator(2, "cpu"))
    whole = cpu_matmul.linear(x, weight, bias)
    bound = 2 * accuracy_bound(dtype, 64)
    assert error_against(whole, reference.linear(x, weight, bias)).relative_norm <= bound
    for rows in ROWS:
        assert identical(cpu_matmul.linear(x[:rows], weight, bias), whole[:rows])


def test_a_batch_of_products_is_that_many_products() -> None:
    """A slice has the bits of its own product, alone or with others, with a shared weight too."""
    rng = generator(3, "cpu")
    a, b = make("bell", (5, 9, 32), torch.float32, "cpu", rng), make("bell", (5, 32, 12), torch.float32, "cpu", rng)
    whole = cpu_matmul.matmul(a, b)
    for i in range(5):
        assert identical(cpu_matmul.matmul(a[i], b[i]), whole[i])
    shared = b[:1].expand(5, -1, -1)
    assert identical(cpu_matmul.matmul(a, shared)[3], cpu_matmul.matmul(a[3], b[0]))


def test_another_thread_gives_the_same_bits() -> None:
    """An engine runs its model on a thread of its own."""
    x, weight = operands(torch.float32, 128, 96)
    here, there = cpu_matmul.linear(x, weight), []
    thread = threading.Thread(target=lambda: there.append(cpu_matmul.linear(x, weight)))
    thread.start()
    thread.join()
    assert identical(here, there[0])


def test_empty_and_misused() -> None:
    """No rows give no rows; gradients and integers are refused in words."""
    weight = torch.rand(4, 3)
    assert cpu_matmul.linear(torch.rand(0, 3), weight).shape == (0, 4)
    assert cpu_matmul.linear(torch.rand(2, 5, 3), weight).shape == (2, 5, 4)
    with pytest.raises(UserError, match="no gradients"):
        cpu_matmul.linear(torch.rand(2, 3), weight.requires_grad_())
    with pytest.raises(UserError, match="int64"):
        cpu_matmul.matmul(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))


def test_it_says_what_ran() -> None:
    """A row of a probe names the calls that the batch was cut into."""
    x, weight = operands(torch.float32, 64, 48)
    with listen() as heard:
        cpu_matmul.linear(x[:3], weight)
    assert [name.startswith("cpu_matmul float32[") for name in heard] == [True]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "columns"), [*((dtype, 96) for dtype in DTYPES), (torch.float32, 1024)])
def test_a_call_found_again_is_like_the_one_before_in_all(dtype: torch.dtype, columns: int, with_bias: bool) -> None:
    """The same bits, by either of the library's ways; each thing that may decide them is looked at alone."""
    x, weight = (t.contiguous() for t in operands(dtype, 64, columns))
    x, bias = x[:16].clone(), torch.ones(columns, dtype=dtype) if with_bias else None
    right = cpu_matmul.linear(x, weight, bias)
    with listen() as before:
        cpu_matmul.linear(x, weight, bias)
    with listen() as heard:
        again = cpu_matmul.linear_again(x, weight, bias)
    if not cpu_matmul.tiles_of(weight.t(), with_bias).plan(16).whole:
        assert again is None  # several library calls, which are planned anew
        return
    assert again is not None
    assert identical(again, right)
    assert list(heard) == list(before) != []
    wide = torch.empty(16, 128, dtype=dtype)[:, :64].copy_(x)
    assert wide.data_ptr() % 64 == 0
    others = {
        "strided rows": (wide, weight, bias),
        "another place": (torch.empty(16 * 64 + 1, dtype=dtype)[1:].view(16, 64).copy_(x), weight, bias),
        "fewer rows": (x[:15], weight, bias),
        "another weight": (x, weight.clone(), bias),
        "a part of the weight": (x, weight[:32], None),
        "its transpose": (x, weight.view(-1).as_strided((columns, 64), (1, columns)), bias),
    }
    if with_bias:
        others |= {
            "another dtype": (x, weight, torch.ones(columns, dtype=torch.float64)),
            "a wider bias": (x, weight, torch.ones(1, dtype=dtype)),
        }
    assert [name for name, call in others.items() if cpu_matmul.linear_again(*call) is not None] == []

"""Tables of choices: what is written is read, the next measured M decides, and stale ranks are not believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nondet.kernels.matmul import cuda as matmul_tables
from nondet.kernels.matmul.cuda import Row, Table, choices, forget_tables, read, rule, slug, write
from nondet.kernels.matmul.triton_kernels import tile_named

GPU = "A GPU 9000"
ROWS = [
    Row("bfloat16", 64, 32, 1, "16x32x128w4s7", 5.0, "16x32x128w4s7", 5.0, 6.0),
    Row("bfloat16", 64, 32, 16, "cublaslt:2", 5.0, "16x32x128w4s4", 6.0, 6.0),
    Row("bfloat16", 64, 32, 256, "cublaslt:0", 9.0, "tma:128x128x64w4s4", 10.0, 9.0),
]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's folder and a packaged one, both empty."""
    user, packaged = tmp_path / "user", tmp_path / "packaged"
    monkeypatch.setattr(matmul_tables, "user_folder", lambda: user)
    monkeypatch.setattr(matmul_tables, "_FOLDER", packaged)
    monkeypatch.setattr(matmul_tables.cublaslt, "version", lambda: 130100)
    forget_tables()
    yield user / f"{slug(GPU)}.json", packaged / f"{slug(GPU)}.json"
    forget_tables()


def first(m: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1, n: int = 32) -> str:
    return choices(batch, m, n, 64, dtype, GPU)[0]


def test_round_trip(tmp_path):
    """A table comes back as it was written, one row a line."""
    table = Table(GPU, "2.11", "3.6", 130100, ROWS)
    write(tmp_path / "new" / "t.json", table)
    assert read(tmp_path / "new" / "t.json") == table
    assert (tmp_path / "new" / "t.json").read_text().count("\n") == len(ROWS) + 10
    (tmp_path / "bad.json").write_text('{"form": 99}')
    with pytest.raises(ValueError, match="form"):
        read(tmp_path / "bad.json")


def test_the_next_measured_m_decides(tables):
    """Between measured Ms a tile that was made for more rows serves; a rank means something at its own M alone."""
    write(tables[1], Table(GPU, "2.11", "3.6", 130100, ROWS))
    assert first(1) == "16x32x128w4s7"
    assert first(16) == "cublaslt:2"
    assert choices(1, 16, 32, 64, torch.bfloat16, GPU)[1:3] == ["cublaslt:0", "16x32x128w4s4"]
    assert first(9) == "cublaslt:0"
    assert first(200) == "cublaslt:0"
    assert "tma:128x128x64w4s4" in choices(1, 200, 32, 64, torch.bfloat16, GPU)


def test_other_shapes_follow_the_rule(tables):
    """No table, another dtype, another weight, a batch, or far more rows than were measured: the rule."""
    assert first(16) == rule(16, 32, 64, torch.bfloat16)[0]
    write(tables[1], Table(GPU, "2.11", "3.6", 130100, ROWS))
    forget_tables()
    assert first(16) == "cublaslt:2"
    for got, dtype in (
        (first(16, batch=2), torch.bfloat16),
        (first(16, torch.float16), torch.float16),
        (first(16, torch.float32), torch.float32),
    ):
        assert got == rule(16, 32, 64, dtype)[0]
    assert choices(1, 100_000, 32, 64, torch.bfloat16, GPU) == rule(100_000, 32, 64, torch.bfloat16)
    assert choices(1, 16, 32, 64, torch.bfloat16, "another GPU") == rule(16, 32, 64, torch.bfloat16)


def test_ranks_of_another_library_are_not_believed(tables, monkeypatch):
    """Ranks are a version's own: under another one its favourite is asked for."""
    write(tables[1], Table(GPU, "2.11", "3.6", 129999, ROWS))
    assert first(16) == "cublaslt:0"
    assert first(1) == "16x32x128w4s7"


def test_a_users_table_comes_first(tables):
    """What was measured on the machine at hand beats what came along, shape by shape."""
    user, packaged = tables
    other = [row._replace(n=48) for row in ROWS]
    write(packaged, Table(GPU, "2.11", "3.6", 130100, ROWS + other))
    write(user, Table(GPU, "2.13", "3.9", 130100, [ROWS[0]._replace(choice="16x64x64w4s6")]))
    assert first(1) == "16x64x64w4s6"
    assert first(1, n=48) == "16x32x128w4s7"


def test_a_broken_table_is_told_and_ignored(tables):
    """Inference goes on without it."""
    tables[0].parent.mkdir(parents=True)
    tables[0].write_text("{")
    with pytest.warns(UserWarning, match="ignored"):
        assert first(16) == rule(16, 32, 64, torch.bfloat16)[0]
    for change in ({"choice": "fast"}, {"triton": "tma:"}, {"choice": None}, {"m": "16"}):
        write(tables[0], Table(GPU, "2.11", "3.6", 130100, [row._replace(**change) for row in ROWS[:1]]))
        forget_tables()
        with pytest.warns(UserWarning, match="ignored"):
            assert first(16) == rule(16, 32, 64, torch.bfloat16)[0]


def test_the_rule_ends_with_a_tile():
    """The last resort needs no library, no TMA and no certificate of a shape."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for m in (1, 16, 17, 100, 257, 5000):
            assert tile_named(rule(m, 4096, 4096, dtype)[-1])


def test_few_columns_over_a_long_k_go_to_hopper_first():
    """In half precision, up to the rows that fill the GPU; the library is asked next, for other GPUs."""
    names = rule(16, 1024, 14336, torch.bfloat16)
    assert names[0].startswith("hopper:16x8x")
    assert names[1] == "cublaslt:0"
    assert rule(64, 1024, 4096, torch.float16)[0].startswith("hopper:32x16x")
    assert rule(128, 1024, 4096, torch.bfloat16)[0].startswith("hopper:32x32x")
    assert rule(256, 1024, 14336, torch.bfloat16)[0].startswith("hopper:64x32x")
    for m, n, k, dtype in (
        (256, 1024, 4096, torch.bfloat16),
        (257, 1024, 14336, torch.bfloat16),
        (16, 4096, 14336, torch.bfloat16),
        (16, 1024, 1024, torch.bfloat16),
        (16, 1024, 14336, torch.float32),
    ):
        assert not any(name.startswith("hopper:") for name in rule(m, n, k, dtype))

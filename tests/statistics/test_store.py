"""Statistics files: what is written comes back, sums add up exactly, damaged and hostile files are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.helpers.merging import flip
from tests.tolerances import F32_PRODUCT, F64_IDENTITY, relative_error
from torch import Tensor, nn

from actmat.errors import OutputError, StatisticsError
from actmat.extras.collect.collect import collect
from actmat.extras.collect.files import merge_statistics
from actmat.extras.collect.inputs.sums import GramSum
from actmat.statistics import open_statistics
from actmat.statistics.header import FILE_NAME, METADATA_KEY
from actmat.statistics.triangle import packed_size, unpack


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double().eval()


def data(seed: int, n: int = 6) -> Tensor:
    return torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written(out: Path, *seeds: int, dtype: str = "float64", **options: Any) -> Path:
    collect(model(), [data(s) for s in seeds], out=out, dtype=dtype, compute_dtype="float64", **options)
    return out


@pytest.mark.parametrize("width", [1, 2, 127, 128, 129, 300])
def test_blocks_of_the_triangle_are_the_whole_product(width: int) -> None:
    rows = torch.randn(40, width, dtype=torch.float64)
    total = GramSum(width, dtype=torch.float64)
    total.add(rows[:15])
    total.add(rows[15:])
    packed = total.stored(whole=True)
    assert packed.shape == (packed_size(width),)
    full = unpack(packed, width)
    assert torch.equal(full, full.T)
    assert relative_error(full, rows.T @ rows) < F64_IDENTITY
    assert total.rows == 40


@pytest.mark.parametrize("batches", [(3,), (2, 2), (4, 3, 20)])
def test_few_rows_are_stored_as_they_are(tmp_path: Path, batches: tuple[int, ...]) -> None:
    """Up to `I / 2` rows; a file of rows and one of sums add up like all batches at once."""
    model = nn.Linear(9, 2, bias=False).double()
    given = [torch.randn(n, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in batches]
    given = [g + k for k, g in enumerate(given)]
    options = {"dtype": "float64", "compute_dtype": "float64"}
    found = collect(model, given, out=tmp_path / "a", **options)
    rows, few = torch.cat(given), sum(batches) <= 4
    assert found.tensors["gram.weight"].shape == (rows.shape if few else (45,))
    collect(model, [rows[:1] * 2], out=tmp_path / "b", **options)
    merge_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    for name, own in (("a", rows), ("b", rows[:1] * 2), ("ab", torch.cat([rows, rows[:1] * 2]))):
        with open_statistics(tmp_path / name) as file:
            assert relative_error(file.gram("weight", dtype=torch.float64), own.T @ own / len(own)) < F64_IDENTITY
            assert file.holds_rows("weight") == (len(own) <= 4)
            if file.holds_rows("weight"):
                root = file.root("weight", dtype=torch.float64)
                assert relative_error(root.T @ root, own.T @ own / len(own)) < F64_IDENTITY


def test_float32_products_are_summed_in_float64() -> None:
    """A sum kept in float32 would stop growing: one part in 2^24 of it is lost each time."""
    total = GramSum(1)
    total.add(torch.full((1, 1), 4096.0))
    for _ in range(100):
        total.add(torch.full((1, 1), 0.5))
    assert total.stored(whole=True).item() == 4096.0**2 + 25.0


def test_what_is_written_comes_back_with_all_means(tmp_path: Path) -> None:
    x = torch.cat([data(1), data(2)])
    with open_statistics(written(tmp_path / "s", 1, 2)) as found:
        key = found.find("0.weight")
        total = x.T @ x
        for mean, divisor in (("sum", 1), ("token", 12)):
            gram = found.gram(key, mean=mean, dtype=torch.float64)
            assert relative_error(gram, total / divisor) < F64_IDENTITY
        assert found.header.samples == 12
        assert found.find("0.bias") is None
        assert len(found.header.model.tensors) == 4
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [FILE_NAME]
    assert not list(tmp_path.glob(".*"))


def test_float32_storage_halves_the_file(tmp_path: Path) -> None:
    wide, narrow = written(tmp_path / "a", 1), written(tmp_path / "b", 1, dtype="float32")
    one, two = (load_file(p / FILE_NAME) for p in (wide, narrow))
    for name in one:
        assert two[name].dtype == torch.float32
        assert relative_error(two[name], one[name]) < F32_PRODUCT


def test_merging_equals_measuring_all_at_once(tmp_path: Path) -> None:
    parts = [written(tmp_path / n, s) for n, s in (("a", 1), ("b", 2), ("c", 3))]
    merged, step = tmp_path / "all", tmp_path / "step"
    merge_statistics(parts, merged)
    merge_statistics(parts[:2], tmp_path / "ab")
    merge_statistics([tmp_path / "ab", parts[2]], step)
    at_once = written(tmp_path / "once", 1, 2, 3)
    one, two, three = (load_file(p / FILE_NAME) for p in (merged, at_once, step))
    assert one.keys() == two.keys()
    for name in one:
        assert relative_error(one[name], two[name]) < F64_IDENTITY
        assert torch.equal(one[name], three[name])
    with open_statistics(merged) as a, open_statistics(at_once) as b:
        assert (a.header.samples, a.header.tokens, len(a.header.data)) == (18, 18, 3)
        assert {k: g.rows for k, g in a.header.grams.items()} == {k: g.rows for k, g in b.header.grams.items()}


def test_files_that_do_not_add_up(tmp_path: Path) -> None:
    a, same, other = written(tmp_path / "a", 1), written(tmp_path / "same", 1), model()
    with torch.no_grad():
        other[2].weight[0, 0] += 1
    collect(other, [data(2)], out=tmp_path / "other")
    for second, says in (
        (same, "measured on the same batches"),
        (tmp_path / "other", r"another model .* 1 tensors differ, such as '2.weight'"),
    ):
        with pytest.raises(StatisticsError, match=says):
            merge_statistics([a, second], tmp_path / "c")
        assert not (tmp_path / "c").exists()


def test_a_damaged_gram_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "s", 1) / FILE_NAME
    flip(file, -3)
    with (
        open_statistics(tmp_path / "s") as found,
        pytest.raises(StatisticsError, match="differs from what was written"),
    ):
        [found.raw(n) for n in found.specs]


def test_a_place_in_use_is_left_alone(tmp_path: Path) -> None:
    out = written(tmp_path / "s", 1)
    before = (out / FILE_NAME).read_bytes()
    with pytest.raises(OutputError, match="already contains statistics"):
        written(out, 2)
    assert (out / FILE_NAME).read_bytes() == before
    written(out, 2, overwrite=True)
    assert (out / FILE_NAME).read_bytes() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"contains other files \(thesis.tex\)"):
        written(tmp_path / "other", 1, overwrite=True)


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    result = collect(model(), [data(1)])

    class Failing(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            raise RuntimeError(name)

    broken = type(result)(result.header, Failing(result.tensors))
    with pytest.raises(RuntimeError):
        broken.save(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (written(tmp_path_factory.mktemp("good") / "s", 1, fisher=True, loss=likelihood) / FILE_NAME).read_bytes()


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["0"]).square().sum()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=4))
def test_truncated_and_altered_files_are_refused_or_sound(
    good: bytes, tmp_path: Path, cut: int, flips: list[tuple[int, int]]
) -> None:
    """Whatever happens to the bytes: a statistics error, or values whose hash was checked. Never anything else."""
    raw = bytearray(good[: len(good) - cut % len(good)] if cut % 3 == 0 else good)
    for place, change in flips:
        if raw:
            raw[place % len(raw)] ^= change
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(raw))
    try:
        with open_statistics(file) as found:
            for name in found.specs:
                found.raw(name)
            for key in found.header.grams:
                found.gram(key)
    except StatisticsError:
        pass


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hostile_metadata_is_refused(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    tensors, header = parts_of(good, tmp_path)
    hostile = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=5), st.just([]), st.just({"a": {}}))
    keys = data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=3, unique=True))
    changed = header | {k: data.draw(hostile) for k in keys}
    file = tmp_path / "y.safetensors"
    save_file(tensors, file, {METADATA_KEY: json.dumps(changed)})
    try:
        with open_statistics(file) as found:
            found.find("0.weight")
            for key in found.header.grams:
                found.gram(key)
    except StatisticsError:
        pass


def parts_of(raw: bytes, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    file = folder / "good.safetensors"
    file.write_bytes(raw)
    length = int.from_bytes(raw[:8], "little")
    return load_file(file), json.loads(json.loads(raw[8 : 8 + length])["__metadata__"][METADATA_KEY])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, t: h["grams"]["0.weight"].update(width=2**19), "expected 137439215616 floats, found 15"),
        (lambda h, t: h["places"]["0.weight"][0].update(gram="../x"), "reads '../x', which is missing"),
        (lambda h, t: h["places"]["0.weight"][0].update(rows=[3, 1]), "are not a range"),
        (lambda h, t: t.update(extra=torch.zeros(3)), "'extra' is stored, but not listed"),
        (lambda h, t: t.pop("gram.0.weight"), "'gram.0.weight' is listed, but not stored"),
        (lambda h, t: h["grams"]["0.weight"].update(stack="s"), "of the stack 's', which is not listed"),
        (lambda h, t: h.update(format=2), "format"),
        (lambda h, t: h.update(surprise=1), "surprise"),
    ],
)
def test_files_that_disagree_with_themselves(good: bytes, tmp_path: Path, change: Any, message: str) -> None:
    tensors, header = parts_of(good, tmp_path)
    change(header, tensors)
    save_file(tensors, tmp_path / "z.safetensors", {METADATA_KEY: json.dumps(header)})
    with pytest.raises(StatisticsError, match=message):
        open_statistics(tmp_path / "z.safetensors")


def test_a_checkpoint_is_no_statistics_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(StatisticsError, match="without 'actmat_statistics' in its metadata"):
        open_statistics(tmp_path / "m.safetensors")
    with pytest.raises(StatisticsError, match="found none"):
        open_statistics(tmp_path)

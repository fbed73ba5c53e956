import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.build import Standardizer


def table(rows=1000, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal([0.0, 5.0, -3.0], [1.0, 10.0, 0.1], (rows, 3)))


def test_training_data_comes_out_with_mean_zero_and_variance_one():
    data = table()
    result = Standardizer.fit(data)(data)
    torch.testing.assert_close(result.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(result.var(0, correction=0), torch.ones(3, dtype=torch.float64))


def test_the_statistics_are_those_of_the_training_data_alone():
    train, test = table(seed=0), table(seed=1) + 100.0
    standardize = Standardizer.fit(train)
    mean = standardize.mean.clone()
    standardize(test)
    assert torch.equal(standardize.mean, mean)
    with pytest.raises(AttributeError):
        standardize.mean = test.mean(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_around_1e8_streamed_in_batches_equals_an_extended_precision_reference(dtype):
    data = (torch.randn(5000, 4, dtype=torch.float64) * 10 + 1e8).to(dtype)
    standardize = Standardizer.fit(data.split(37))
    exact = data.double().numpy().astype(np.longdouble)
    np.testing.assert_allclose(standardize.mean.numpy(), exact.mean(0).astype(np.float64), rtol=1e-15)
    np.testing.assert_allclose(standardize.scale.numpy(), exact.std(0).astype(np.float64), rtol=1e-9)


def test_the_textbook_formula_fails_where_this_one_holds():
    data = torch.randn(1000, dtype=torch.float64) * 1e-2 + 1e8
    naive = (data.square().mean() - data.mean().square()).item()
    assert naive != pytest.approx(1e-4, rel=0.5)
    assert float(Standardizer.fit(data.unsqueeze(1)).scale) == pytest.approx(float(data.std(correction=0)), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(0, 1000))
def test_any_split_into_batches_gives_the_same_statistics(sizes, seed):
    data = table(sum(sizes), seed)
    whole, parts = Standardizer.fit(data), Standardizer.fit(data.split(sizes))
    torch.testing.assert_close(whole.mean, parts.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole.scale, parts.scale, rtol=1e-9, atol=1e-12)
    assert torch.equal(whole.count, parts.count)


def test_merging_workers_equals_fitting_at_once():
    data = table()
    merged = Standardizer.fit(data[:100]).merge(Standardizer.fit(data[100:]))
    torch.testing.assert_close(merged.scale, Standardizer.fit(data).scale)


def test_a_column_that_never_varies_becomes_exactly_zero_even_far_from_zero():
    data = torch.cat([table(), torch.full((1000, 1), 1e8 + 1 / 3, dtype=torch.float64)], 1)
    standardize = Standardizer.fit(data.split(7))
    assert standardize.constant.tolist() == [False, False, False, True]
    result = standardize(data)
    assert bool(result.isfinite().all())
    assert float(result[:, 3].abs().max()) < 1e-6
    assert float(standardize.scale[3]) == 1.0


def test_token_ids_are_refused_and_the_message_says_why():
    with pytest.raises(TypeError, match=r"int64.*names and not amounts.*Embedding"):
        Standardizer.fit(torch.randint(0, 100, (4, 4)))
    with pytest.raises(TypeError, match="token ids"):
        Standardizer.fit(table())(np.array([[1, 2, 3]]))
    with pytest.raises(TypeError, match="normalize_images"):
        Standardizer.fit(torch.zeros(2, 2, dtype=torch.uint8))


def test_nan_is_refused_by_column_unless_a_policy_says_otherwise():
    data = table()
    data[3, 1], data[4, 1] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"2 values.*features \[1\]"):
        Standardizer.fit(data)
    clean = Standardizer.fit(data[5:])
    for policy in ("ignore", "fill"):
        fitted = Standardizer.fit(data, nan=policy)
        assert fitted.count.tolist() == [1000, 998, 1000]
        finite = data[:, 1][data[:, 1].isfinite()]
        torch.testing.assert_close(fitted.mean[1], finite.mean())
        result = fitted(data)
        assert bool(result[3, 1].isnan()) == (policy == "ignore")
        assert policy == "ignore" or float(result[3, 1]) == 0.0
    with pytest.raises(ValueError, match="NaN or Inf"):
        clean(data)


def test_a_column_with_nothing_finite_and_no_data_at_all_are_refused():
    data = table()
    data[:, 2] = float("nan")
    with pytest.raises(ValueError, match=r"\[2\] have no finite value"):
        Standardizer.fit(data, nan="ignore")
    with pytest.raises(ValueError, match="No data"):
        Standardizer.fit([])
    with pytest.raises(ValueError, match="2 dimensions"):
        Standardizer.fit(torch.randn(5))
    with pytest.raises(ValueError, match="'drop'"):
        Standardizer.fit(table(), nan="drop")


def test_undo_returns_to_the_original_scale():
    data = table()
    standardize = Standardizer.fit(data)
    torch.testing.assert_close(standardize.undo(standardize(data)), data)


def test_type_shape_and_numpy_input_are_kept():
    data = table().float()
    standardize = Standardizer.fit(data.numpy())
    assert standardize(data).dtype == torch.float32
    assert standardize(data[0]).shape == (3,)
    with pytest.raises(ValueError, match="Fitted on 3 features; got 2"):
        standardize(data[:, :2])


def test_images_are_standardised_per_channel():
    images = torch.rand(10, 3, 8, 8, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    result = Standardizer.fit(images.split(3), feature_axis=1)(images)
    torch.testing.assert_close(result.var((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64))


def test_saved_statistics_load_exactly_and_hold_no_code(tmp_path):
    standardize = Standardizer.fit(table(), nan="fill")
    standardize.save(tmp_path / "scale.json")
    loaded = Standardizer.load(tmp_path / "scale.json")
    assert torch.equal(loaded(table()), standardize(table()))
    assert torch.equal(loaded.mean, standardize.mean)
    assert (loaded.nan, loaded.feature_axis) == ("fill", -1)
    assert json.loads((tmp_path / "scale.json").read_text())["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


@pytest.mark.parametrize("content", ["not json", "[]", '{"format": "other"}'])
def test_a_strange_file_is_refused(tmp_path, content):
    (tmp_path / "scale.json").write_text(content)
    with pytest.raises(ValueError, match="not a saved Standardizer"):
        Standardizer.load(tmp_path / "scale.json")


def test_fitted_statistics_cannot_be_changed_by_hand():
    train = table()
    standardize = Standardizer.fit(train)
    expected = standardize(train)
    for name in ("count", "mean", "spread", "lowest", "highest", "scale", "constant"):
        getattr(standardize, name).zero_()
    assert torch.equal(standardize(train), expected)
    given = {name: getattr(standardize, name) for name in ("count", "mean", "spread", "lowest", "highest")}
    again = Standardizer(**given, feature_axis=-1, nan="raise")
    given["mean"] += 100.0
    assert torch.equal(again(train), expected)
    copied = pickle.loads(pickle.dumps(standardize))
    assert torch.equal(copied(train), expected)

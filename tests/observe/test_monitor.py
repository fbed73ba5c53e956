import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from streams import NAN


class CountReads(TorchDispatchMode):
    """Counts how often a single value is read off a tensor."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def backward(net):
    net.zero_grad()
    net(torch.randn(16, 5)).square().mean().backward()


def norm(tensor):
    return np.linalg.norm(tensor.detach().double().numpy())


# ---- GradientMonitor ------------------------------------------------------------------------------------------------


def test_every_layer_has_its_norms_and_their_ratio():
    net = model()
    backward(net)
    layers = sf.GradientMonitor(net).observe().layers
    assert layers.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert layers.ranks == (2, 1, 2, 1)
    grads, weights = zip(*((norm(p.grad), norm(p)) for p in net.parameters()), strict=True)
    np.testing.assert_allclose(layers.grad_norm, grads, rtol=1e-6)
    np.testing.assert_allclose(layers.param_norm, weights, rtol=1e-6)
    np.testing.assert_allclose(layers.grad_to_param, np.divide(grads, weights), rtol=1e-6)
    np.testing.assert_allclose(layers.grad_largest, [p.grad.abs().max() for p in net.parameters()])
    assert layers.nonfinite.tolist() == [0.0] * 4


def test_the_total_is_what_clipping_would_see():
    net = model()
    backward(net)
    report = sf.GradientMonitor(net).observe()
    assert report.total_norm == torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9).item()
    assert str(report).startswith("total gradient norm ")


def test_parameter_norm_and_ratio_are_reported_in_total_too():
    net = model()
    net[0].requires_grad_(False)
    backward(net)
    report = sf.GradientMonitor(net).observe()
    weights = norm(torch.cat([p.flatten() for p in net[2].parameters()]))
    assert report.total_param_norm == pytest.approx(weights, rel=1e-6)
    assert report.total_ratio == pytest.approx(report.total_norm / weights, rel=1e-6)
    head = str(report).splitlines()[0]
    assert head == f"total gradient norm {report.total_norm:.4g}, parameter norm {weights:.4g}, their ratio " + (
        f"{report.total_ratio:.4g}"
    )


def test_the_ratio_to_parameters_that_are_all_zero_is_infinite():
    net = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    net(torch.ones(1, 2)).sum().backward()
    assert sf.GradientMonitor(net).observe().total_ratio == np.inf


def test_observing_reads_nothing_value_by_value():
    net = model()
    backward(net)
    monitor = sf.GradientMonitor(net)
    with CountReads() as counted:
        monitor.observe()
    assert counted.reads == 0
    with CountReads() as counted:
        float(torch.ones(1))
    assert counted.reads == 1


def test_a_report_keeps_the_numbers_of_its_own_step():
    net = model()
    backward(net)
    monitor = sf.GradientMonitor(net)
    report, expected = monitor.observe(), [norm(p.grad) for p in net.parameters()]
    for parameter in net.parameters():
        parameter.grad.mul_(100.0)
    np.testing.assert_allclose(report.layers.grad_norm, expected, rtol=1e-6)


def test_a_broken_layer_is_named_and_counted():
    net = model()
    backward(net)
    net[2].weight.grad[0, :3] = NAN
    report = sf.GradientMonitor(net).observe()
    assert report.layers.nonfinite_counts() == {"2.weight": 3}
    assert np.isnan(report.total_norm)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.5])
def test_update_to_weight_is_what_the_step_did_over_what_was_there(learning_rate):
    net = model()
    backward(net)
    monitor = sf.GradientMonitor(net)
    before = [p.detach().clone() for p in net.parameters()]
    monitor.before_step()
    torch.optim.SGD(net.parameters(), lr=learning_rate).step()
    ratios = monitor.observe_update()
    assert list(ratios) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    expected = [norm(p - old) / norm(old) for p, old in zip(net.parameters(), before, strict=True)]
    np.testing.assert_allclose(list(ratios.values()), expected, rtol=1e-5)
    flat, old = (torch.cat([p.flatten() for p in each]) for each in (net.parameters(), before))
    assert ratios.total == pytest.approx(norm(flat - old) / norm(old), rel=1e-5)


def test_an_update_without_a_copy_from_before_is_refused_with_the_way_out():
    monitor = sf.GradientMonitor(model())
    with pytest.raises(sf.UsageError, match=r"`before_step\(\)`"):
        monitor.observe_update()
    monitor.before_step()
    monitor.observe_update()
    with pytest.raises(sf.UsageError, match=r"`before_step\(\)`"):
        monitor.observe_update()


def test_observing_before_backward_is_refused_with_the_way_out():
    with pytest.raises(sf.UsageError, match=r"after backward"):
        sf.GradientMonitor(model()).observe()


def test_layers_without_a_gradient_are_left_out():
    net = model()
    net[0].requires_grad_(False)
    backward(net)
    assert sf.GradientMonitor(net).observe().layers.names == ("2.weight", "2.bias")


def test_tied_weights_are_measured_once():
    net = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    net[1].weight = net[0].weight
    backward(net)
    assert sf.GradientMonitor(net).observe().layers.names == ("0.weight", "0.bias", "1.bias")


def test_sparse_gradients_are_measured():
    net = torch.nn.Embedding(10, 4, sparse=True)
    net(torch.tensor([1, 1, 2])).sum().backward()
    report = sf.GradientMonitor(net).observe()
    assert report.total_norm == pytest.approx(norm(net.weight.grad.to_dense()))


# ---- parameter_report -----------------------------------------------------------------------------------------------


def test_the_parameter_report_is_that_of_float64():
    net = model()
    backward(net)
    rows = sf.parameter_report(net).rows
    assert [row["name"] for row in rows] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [row["shape"] for row in rows] == [(8, 5), (8,), (3, 8), (3,)]
    for row, parameter in zip(rows, net.parameters(), strict=True):
        data = parameter.detach().double().numpy()
        found = [row[key] for key in ("mean", "std", "norm", "grad_norm")]
        np.testing.assert_allclose(found, [data.mean(), data.std(), norm(parameter), norm(parameter.grad)], rtol=1e-12)


def test_a_parameter_without_a_gradient_has_none_to_report():
    report = sf.parameter_report(model())
    assert [row["grad_norm"] for row in report.rows] == [None] * 4
    assert all(line.endswith(" none") for line in str(report).splitlines()[1:])


def test_a_gradient_that_is_nan_is_not_shown_as_missing():
    net = model()
    backward(net)
    net[0].bias.grad[0] = NAN
    report = sf.parameter_report(net)
    assert np.isnan(report.rows[1]["grad_norm"])
    assert str(report).splitlines()[2].endswith(" nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_every_dtype_is_reported(dtype):
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.full((3, 4), 2.0, dtype=dtype))
    net.weight.grad = torch.ones_like(net.weight)
    (row,) = sf.parameter_report(net).rows
    assert row["norm"] == pytest.approx(np.sqrt(48.0))
    assert row["grad_norm"] == pytest.approx(np.sqrt(12.0))


def test_scalars_and_empty_parameters_are_reported_too():
    net = torch.nn.Module()
    net.gain = torch.nn.Parameter(torch.tensor(3.0))
    net.nothing = torch.nn.Parameter(torch.empty(0, 4))
    gain, nothing = sf.parameter_report(net).rows
    assert (gain["shape"], gain["mean"], gain["std"], gain["norm"]) == ((), 3.0, 0.0, 3.0)
    assert (nothing["shape"], nothing["norm"]) == ((0, 4), 0.0)


def test_a_report_prints_as_a_table_of_equal_columns():
    lines = str(sf.parameter_report(model())).splitlines()
    assert lines[0].split() == ["name", "shape", "mean", "std", "norm", "grad_norm"]
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1


def test_a_model_without_parameters_has_nothing_to_report():
    assert str(sf.parameter_report(torch.nn.ReLU())) == "(nothing)"

"""Which operand of a layer is its input, and how many inputs each output adds up, however the product is written."""

import pytest
import torch
from torch import nn

from surefoot.watch.call_facts import CallFacts
from surefoot.watch.function_recorder import FunctionRecorder

weight = nn.Parameter(torch.randn(24, 6) * 0.02)  # (inputs, outputs), as the Conv1D of GPT-2 has it
bias = nn.Parameter(torch.zeros(6))


def layers_of(call):
    """What is recorded of the layers that a function calls."""

    def number_of(tensor):
        return 7 if tensor is weight else 8 if tensor is bias else None

    def take(entry, args, kwargs, out, tensors):
        entry.parameters = [number for tensor in tensors if (number := number_of(tensor)) is not None]
        facts.take(entry, args, kwargs, out)

    recorder = FunctionRecorder(take, lambda probe, observe, *args: observe(*args))
    facts = CallFacts(0, number_of, recorder)
    with recorder:
        call(torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * 3)
    return facts.as_facts().layers


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.addmm(bias, x, weight),
        lambda x: torch.addmm(input=bias, mat1=x, mat2=weight),
        lambda x: x @ weight + bias,
        lambda x: weight.t() @ x.t(),
        lambda x: torch.einsum("io,bi->bo", weight, x),
        lambda x: torch.nn.functional.linear(x, weight.t(), bias),
    ],
)
def test_the_input_of_a_product_is_neither_its_bias_nor_its_weight(call):
    (layer,) = layers_of(call)
    assert layer.parameter == 7
    assert layer.in_std == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(
    "call", [lambda x: torch.addmm(bias, x, weight), lambda x: x @ weight, lambda x: weight.t() @ x.t()]
)
def test_the_fan_in_of_a_weight_that_is_written_inputs_first_is_the_number_of_inputs(call):
    (layer,) = layers_of(call)
    assert layer.fan_in == 24


def test_one_row_through_a_matrix_is_a_layer():
    (layer,) = layers_of(lambda x: torch.addmv(bias, weight.t(), x[0]))
    assert (layer.parameter, layer.fan_in) == (7, 24)
    assert layer.in_std > 1


def test_samples_of_outputs_are_taken_only_where_histograms_are_logged():
    class Entry:
        name, index, site, module, out_grad, out_dtype, inputs = "relu", 0, "", "act", True, "float32", ()

    values = torch.randn(8, 4)
    for keeps_outputs in (False, True):
        facts = CallFacts(0, lambda tensor: None, None, keeps_outputs)
        facts.layers.activation(Entry(), values)
        assert [name for name, _ in facts.layers.outputs] == ["act.relu"] * keeps_outputs
        assert len(facts.layers.activations) == 1

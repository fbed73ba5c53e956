"""A state goes through JSON and named tensors and comes back exactly, or is refused with its path."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from surefoot import CheckpointError, UsageError
from surefoot.keep.checkpoint.plain import unflatten
from surefoot.keep.checkpoint.tree import flatten
from surefoot.keep.staging import stage

DTYPES = sorted(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    },
    key=str,
)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one, other):
    """Equal in type, value, order, sign of zero, and NaN where NaN was."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and str(one) == str(other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return one == other


def there_and_back(tree):
    plain, tensors = flatten(tree)
    return unflatten(json.loads(json.dumps(plain, allow_nan=False)), tensors)


def tensor_of(dtype):
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    return raw.remainder(2).bool() if dtype is torch.bool else raw.view(dtype)


words = st.text(st.characters(exclude_categories=()), max_size=6)
keys = st.one_of(words, st.sampled_from(["$", "items", "a.b", "__metadata__"]), st.integers(), st.booleans())
keys = st.one_of(keys, st.tuples(keys, keys), st.none())
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), words, st.binary(max_size=9)),
    st.sampled_from([torch.float16, torch.device("cuda", 3), torch.device("cpu"), torch.Size([2, 0])]),
    st.sampled_from(DTYPES).map(tensor_of),
    st.sampled_from([np.float32(-0.0), np.bool_(True), np.int8(-3), np.datetime64("2020-01-01"), np.str_("é")]),
    st.sampled_from([np.arange(6.0).reshape(2, 3).T, np.array(4, ">i4"), np.array(["ab", "c"]), np.zeros((0, 3))]),
)


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    )


@given(st.recursive(scalars, containers, max_leaves=20))
@example({"$": "tensor", "name": "x"})
@example({"a": {"$": 1, "b": {"$": {"$": None}}}})
@example("\ud83d\ude00 is two halves, 😀 is one")
@example(10**5000)
@example(torch.tensor(-0.0))
@example([])
def test_random_states_come_back_exactly(tree):
    assert same(there_and_back(tree), tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype):
    values = tensor_of(dtype)
    tree = {
        "row": values,
        "one": values[3],
        "none": values[:0],
        "table": values.reshape(2, 3).t(),
        "every": values[::2],
    }
    tree["wide"] = values[:1].expand(4)
    assert same(there_and_back(tree), tree)


def test_conjugates_and_parameters_come_back_as_plain_values():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert there_and_back({"c": values.conj()})["c"].tolist() == [1 - 2j, 3 + 4j]
    assert there_and_back({"n": values.conj().imag})["n"].tolist() == [-2.0, 4.0]
    parameter = there_and_back([torch.nn.Parameter(torch.ones(2))])[0]
    assert type(parameter) is torch.Tensor
    assert not parameter.requires_grad


def test_tied_weights_are_stored_once_and_come_back_as_one_tensor():
    weight = torch.randn(4, 4)
    plain, tensors = flatten({"in": weight, "out": weight.view(4, 4), "part": weight[:2], "turned": weight.t()})
    assert sorted(tensors) == ["in", "part", "turned"]
    back = unflatten(plain, tensors)
    assert back["in"] is back["out"]
    assert torch.equal(back["turned"], weight.t())
    assert len(flatten([torch.empty(0), torch.empty(0)])[1]) == 2


def test_of_a_dtensor_the_local_shard_is_kept():
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.arange(6.0).reshape(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        tree = {"weight": torch.nn.Parameter(shard), "tied": shard}
        for back in (there_and_back(tree), there_and_back(stage(tree).tree)):
            assert type(back["weight"]) is torch.Tensor
            assert back["weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
            assert back["tied"] is back["weight"]
    finally:
        dist.destroy_process_group()


def test_states_of_optimizers_and_schedulers_come_back():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.8, 0.9))
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 9]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    tree = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
    tree["schedulers"] = [scheduler.state_dict() for scheduler in schedulers]
    back = there_and_back(tree)
    assert same(back, tree)
    assert type(back["schedulers"][0]["milestones"]) is Counter
    assert back["net"]._metadata == tree["net"]._metadata
    assert there_and_back(defaultdict(list, {"a": [1]})) == {"a": [1]}


def test_names_are_readable_paths_and_never_the_same():
    tree = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "a.b~2": torch.ones(2), 1: [torch.ones(3)]}
    tree |= {
        "1.0": torch.ones(4),
        "__metadata__": torch.ones(5),
        "\ud800": torch.ones(6),
        "long" * 1_000: torch.ones(7),
    }
    plain, tensors = flatten(tree)
    assert {"a.b", "a.b~2", "1.0"} < set(tensors)
    assert len(tensors) == 8
    assert "__metadata__" not in tensors
    assert all(len(name.encode()) < 2_000 for name in tensors)
    assert same(unflatten(plain, tensors), tree)
    assert list(flatten(torch.ones(1))[1]) == ["value"]


Point = namedtuple("Point", "x y")
itself = []
itself.append(itself)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda step: 1.0, r"scheduler\.0\.made is a builtins\.function"),
        (Point(1, 2), r"scheduler\.0\.made is a .*Point"),
        (torch.ones(2, 2).to_sparse(), r"scheduler\.0\.made is a tensor of the kind sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
        ({torch.ones(1): 1}, r"scheduler\.0\.made has tensors as keys.*state_dict"),
        (np.array([{}]), "NumPy array of object"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "NumPy array of"),
        (itself, "Check whether it contains itself"),
        (object, "builtins.type"),
        (range(3), "builtins.range"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(value, says):
    with pytest.raises(UsageError, match=says):
        flatten({"scheduler": [{"made": value}]})


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def str_or_kind(plain):
    return str(plain)[:60] if isinstance(plain, dict) else type(plain).__name__


HOSTILE = [
    {"$": "os.system", "args": ["touch x"]},
    {"$": ["tuple"]},
    {"$": None},
    {"$": "tuple"},
    {"$": "tuple", "items": 3},
    {"$": "dict", "items": [[1]]},
    {"$": "dict", "items": [[[], 1]]},
    {"$": "dict", "items": [[{"$": "tensor", "name": "t"}, 1]]},
    {"$": "set", "items": [[1]]},
    {"$": "tensor", "name": "absent"},
    {"$": "tensor", "name": ["t"]},
    {"$": "tensor", "name": "t", "as": "complex"},
    {"$": "tensor", "name": "t", "as": "torch.load", "shape": [3]},
    {"$": "tensor", "name": "t", "as": "torch.int64", "shape": [-1]},
    {"$": "tensor", "name": "t", "as": "torch.uint8", "shape": [10**12]},
    {"$": "numpy", "name": "t", "dtype": "|O8", "shape": [3]},
    {"$": "numpy", "name": "t", "dtype": "<f8", "shape": [3]},
    {"$": "numpy", "name": "t", "dtype": "f8,O", "shape": [3]},
    {"$": "numpy.scalar", "dtype": "|O8", "hex": "00" * 8},
    {"$": "numpy.scalar", "dtype": "<U1", "hex": "ff" * 4},
    {"$": "numpy.scalar", "dtype": "<f8", "hex": "zz"},
    {"$": "float", "value": "infinity"},
    {"$": "float", "value": [1]},
    {"$": "int", "hex": "12q"},
    {"$": "str", "hex": "ff"},
    {"$": "bytes", "base64": "?"},
    {"$": "complex", "real": "1", "imag": 2},
    {"$": "torch.dtype", "value": "torch.load"},
    {"$": "torch.device", "value": "the moon"},
    {"$": "torch.Size", "value": ["a"]},
    {"$": "ordered", "items": {}},
    {"$": "counter", "items": [[1, 2, 3]]},
    {"$": "counter"},
    deep(5_000),
    {1, 2},
    b"raw",
    torch.ones(1),
]


@pytest.mark.parametrize("plain", HOSTILE, ids=str_or_kind)
def test_a_state_from_a_stranger_is_refused_with_one_kind_of_error(plain):
    with pytest.raises(CheckpointError):
        unflatten(plain, {"t": torch.arange(3, dtype=torch.float32)})


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "items", "name", "value", "hex", "as", "shape", "dtype"]), inner),
        st.fixed_dictionaries(
            {"$": st.sampled_from(["tuple", "dict", "tensor", "numpy", "float", "set", "numpy.scalar", "counter"])},
            optional=dict.fromkeys(("items", "name", "value", "hex", "as", "shape", "dtype", "metadata"), inner),
        ),
    ),
    max_leaves=15,
)


@given(json_values)
def test_any_json_gives_a_state_or_that_error(plain):
    with suppress(CheckpointError):
        unflatten(plain, {"t": torch.ones(3)})

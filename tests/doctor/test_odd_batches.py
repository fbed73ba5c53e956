"""Batches and models come in every shape: the preflight finds its way, or says what it needs."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor_healthy import clusters
from surefoot.doctor.examine import examine
from surefoot.errors import SettingError, UsageError

Pair = namedtuple("Pair", ["image", "label"])
X, Y = clusters(128)
ROWS = list(zip(X.split(32), Y.split(32), strict=True))


class Takes(nn.Module):
    """A linear classifier whose forward is given from outside."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.how = forward

    def forward(self, *args, **kwargs):
        return self.how(self.layer, *args, **kwargs)


def plain(layer, x):
    return layer(x)


def with_lengths(layer, x, lengths):
    return layer(x / lengths.unsqueeze(1))


def named(layer, x=None, labels=None):
    logits = layer(x)
    return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


ONES = torch.ones(32)
ODD = {
    "tuple": (plain, [(x, y) for x, y in ROWS], True),
    "list": (plain, [[x, y] for x, y in ROWS], True),
    "named tuple": (plain, [Pair(x, y) for x, y in ROWS], True),
    "lengths in the middle": (with_lengths, [(x, ONES, y) for x, y in ROWS], True),
    "lengths at the end": (with_lengths, [(x, y, ONES) for x, y in ROWS], True),
    "lengths the model does not want": (plain, [(x, y, ONES) for x, y in ROWS], True),
    "dict": (plain, [{"x": x, "y": y} for x, y in ROWS], True),
    "dict with strange keys": (plain, [{"picture": x, "label": y, "id": "abc"} for x, y in ROWS], True),
    "dict and own loss": (named, [{"x": x, "labels": y} for x, y in ROWS], False),
    "dict, object with logits, loss outside": (named, [{"x": x, "labels": y} for x, y in ROWS], True),
    "whole dict into the model": (lambda layer, batch: layer(batch["x"]), [{"x": x, "y": y} for x, y in ROWS], True),
    "tuple out": (lambda layer, x: (layer(x), x), ROWS, True),
    "dict out": (lambda layer, x: {"features": x.mean(), "logits": layer(x)}, ROWS, True),
    "model takes both, returns the loss": (lambda layer, x, y: F.cross_entropy(layer(x), y), ROWS, False),
    "model takes both, returns a tuple": (lambda layer, x, y: (F.cross_entropy(layer(x), y), x), ROWS, False),
    "NumPy arrays": (plain, [(x.numpy(), y.numpy()) for x, y in ROWS], True),
    "uneven rows": (plain, [(X[:32], Y[:32]), (X[32:35], Y[32:35])], True),
}


@pytest.mark.parametrize("name", ODD)
def test_the_way_to_call_the_model_is_found(name):
    torch.manual_seed(0)
    forward, batches, with_loss = ODD[name]
    model = Takes(forward)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    examination = examine(model, batches, nn.CrossEntropyLoss() if with_loss else None, optimizer, seconds=0.2)
    assert examination["forward"].status == "pass", examination["forward"].summary
    assert examination.ok, str(examination)
    assert "could not run" not in str(examination)


def test_a_batch_of_one_tensor_is_its_own_target():
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16))
    examination = examine(model, list(X.split(32)), nn.MSELoss(), torch.optim.Adam(model.parameters()), seconds=0.2)
    assert "loss_fn(model(batch), batch)" in examination["forward"].summary
    assert examination.ok


def test_loss_of_says_how_when_it_cannot_be_guessed():
    model = nn.Linear(16, 4)
    batches = [{"weird": {"deep": [x]}, "answer": y} for x, y in ROWS]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(model, batch):
        return F.cross_entropy(model(batch["weird"]["deep"][0]), batch["answer"])

    assert examine(model, batches, None, optimizer, seconds=0.2)["forward"].status == "fail"
    assert examine(model, batches, None, optimizer, loss_of=loss_of, seconds=0.2).ok
    assert examine(model, batches, loss_of, optimizer, seconds=0.2).ok


def test_an_object_with_attributes_is_a_batch_too():
    model = Takes(lambda layer, batch: layer(batch.x))
    batches = [SimpleNamespace(x=x, y=y) for x, y in ROWS]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert examine(model, batches, nn.CrossEntropyLoss(), optimizer, seconds=0.2)["forward"].status == "pass"


def test_without_an_optimizer_what_needs_one_is_skipped():
    examination = examine(nn.Linear(16, 4), ROWS, nn.CrossEntropyLoss(), seconds=0.2)
    assert examination["learning rate"].status == "skipped"
    assert examination["tiny batch"].status == "pass"
    assert examination.ok


def test_a_missing_loss_is_said_and_the_way_out_too():
    check = examine(nn.Linear(16, 4), ROWS, seconds=0.2)["forward"]
    assert check.status == "fail"
    assert "loss_fn" in check.summary


def test_a_wrong_input_width_names_the_shapes():
    check = examine(nn.Linear(15, 4), ROWS, nn.CrossEntropyLoss(), seconds=0.2)["forward"]
    assert check.status == "fail"
    assert "mat1 and mat2" in check.summary
    assert "in_features" in check.fix


def test_a_wrong_dtype_is_explained():
    check = examine(nn.Linear(16, 4), [(x.double(), y) for x, y in ROWS], nn.CrossEntropyLoss(), seconds=0.2)["forward"]
    assert check.status == "fail"
    assert "dtype" in check.fix


def test_a_model_that_cannot_be_copied_is_not_run_at_all():
    class Uncopyable(nn.Linear):
        calls = 0

        def __deepcopy__(self, memo):
            raise RuntimeError("this holds a socket")

        def forward(self, x):
            Uncopyable.calls += 1
            return super().forward(x)

    examination = examine(Uncopyable(16, 4), ROWS, nn.CrossEntropyLoss(), seconds=0.2)
    assert Uncopyable.calls == 0
    assert examination["forward"].status == "skipped"
    assert "this holds a socket" in examination["forward"].summary
    assert examination["finite data"].status == "pass"


def test_a_check_that_fails_to_run_does_not_stop_the_others():
    class Moody(nn.Linear):
        """Runs only while gradients are on and the batch is whole."""

        def forward(self, x):
            if len(x) != 32:
                raise RuntimeError("I only take 32 rows")
            return super().forward(x)

    examination = examine(Moody(16, 4), ROWS, nn.CrossEntropyLoss(), seconds=0.2)
    assert "I only take 32 rows" in examination["overfits a tiny batch"].summary
    assert examination["finite data"].status == "pass"


def test_lbfgs_which_needs_a_closure_is_stepped_with_one():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    examination = examine(model, ROWS, nn.CrossEntropyLoss(), optimizer, seconds=0.2)
    assert examination["tiny batch"].status == "pass"
    assert examination["kept graphs"].status == "pass"


def test_a_compiled_model_is_unwrapped_and_a_note_says_so():
    model = torch.compile(nn.Linear(16, 4))
    examination = examine(
        model, ROWS, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2), seconds=0.5
    )
    assert examination.ok
    assert "Linear inside the OptimizedModule" in examination.notes[0]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("model", ROWS), {}, "torch.nn.Module"),
        ((nn.Linear(1, 1), 3), {}, "batches"),
        ((nn.Linear(1, 1), []), {}, "returned no batch"),
        ((nn.Linear(1, 1), ROWS, None, "adam"), {}, "torch optimizer"),
        ((nn.Linear(1, 1), ROWS), {"seconds": 0}, "seconds"),
    ],
)
def test_what_cannot_be_examined_is_refused_with_the_way_out(arguments, settings, message):
    with pytest.raises((UsageError, SettingError), match=message):
        examine(*arguments, **settings)


def test_a_loader_that_raises_is_named():
    def broken():
        raise OSError("disk on fire")
        yield

    with pytest.raises(UsageError, match="disk on fire"):
        examine(nn.Linear(1, 1), broken())


def test_rows_in_both_splits_are_found():
    model = nn.Linear(16, 4)
    shared = [(X[:32], Y[:32])]
    fresh = [(torch.randn(64, 16), torch.randint(4, (64,)))]
    loss_fn = nn.CrossEntropyLoss()
    assert examine(model, ROWS, loss_fn, eval_loader=shared, seconds=0.2)["leakage"].cause == "data.leakage"
    assert examine(model, ROWS, loss_fn, eval_loader=fresh, seconds=0.2)["leakage"].status == "pass"


def test_an_eval_split_on_another_scale_is_found():
    model = nn.Linear(16, 4)
    shifted = [(torch.randn(64, 16) * 5 + 3, torch.randint(4, (64,)))]
    examination = examine(model, ROWS, nn.CrossEntropyLoss(), eval_loader=shifted, seconds=0.2)
    assert examination["same scale in both splits"].cause == "data.split-mismatch"

"""`RunFacts` against `facts.json` files of version 1: three whole runs, and one put together from every kind of fact.

The last one was made from the 275 runs of the zoo: of each list, only entries that bring a new key or a new type.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.formats import FACTS
from surefoot.record import facts as all_facts
from surefoot.record.facts import (
    ExperimentFacts,
    Facts,
    FactsError,
    GroupSettings,
    NonFiniteLossEvent,
    RunFacts,
    SpikeEvent,
)

RECORDED = sorted((Path(__file__).parent / "version1").glob("*.json"))
NO_LONGER_RECORDED = {
    "activations": "grad shape zeros",
    "clips": "by_value scale scaled",
    "data": "zeros",
    "distribution": "argmax_classes",
    "embeddings": "shape",
    "errors": "out_shape pinned_high pinned_low target_producer target_variance",
    "evaluations": "diversity index",
    "events": "backwards_late batch divisor_shape",
    "input": "negative zeros",
    "inputs": "zeros",
    "layers": "shape",
    "loaders": "training",
    "losses": "log_target pinned_high pinned_low row_sum_error target_producer",
    "made_from": "index op",
    "modules": "bidirectional dropout eps momentum num_embeddings num_features p",
    "norms": "in_std",
    "other": "zeros",
    "outputs": "zeros",
    "parameters": "found_in",
    "passes": "diversity index",
    "products": "grown",
    "risky": "dtype in_nonfinite lowest out_nonfinite",
    "roots": "strange",
    "rows": "moment_norm",
    "softmaxes": "causal dim",
    "target": "negative zeros",
    "terms": "reach",
    "weight": "zeros",
}
"""By what has them: keys of version 1 that no rule reads."""


def classes() -> list[type[Facts]]:
    return [each for each in vars(all_facts).values() if isinstance(each, type) and issubclass(each, Facts)]


def _left_out(written: Any, recorded: Any, place: str = "facts") -> set[str]:
    """Recorded keys that are not written, each behind the key of what has it. What is written is as recorded."""
    if isinstance(written, dict):
        assert written.keys() <= recorded.keys()
        inside = [_left_out(each, recorded[key], key) for key, each in written.items()]
        return {f"{place}.{key}" for key in recorded.keys() - written.keys()}.union(*inside)
    if isinstance(written, list):
        return set().union(*(_left_out(*pair, place) for pair in zip(written, recorded, strict=True)))
    assert written == recorded
    return set()


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "version1" / f"{name}.json").read_text("utf-8"))
    return FACTS.read(found, name)  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_facts_are_read_and_written_back_with_the_names_of_version_2(path: Path) -> None:
    text = path.read_text("utf-8")
    value = FACTS.read(json.loads(text), str(path))
    known = {f"{place}.{key}" for place, keys in NO_LONGER_RECORDED.items() for key in keys.split()}
    assert _left_out(RunFacts.from_json(value).to_json(), value) <= known
    renamed = {
        "looks": "sampled_steps",
        "looked": "sampled",
        "born_at": "created_at_step",
        "loaded_at": "state_loaded_at_step",
        "loaded_age": "loaded_state_steps",
        "left_out": "skipped",
    }
    for old, new in renamed.items():
        text = text.replace(f'"{old}":', f'"{new}":')
    assert value == json.loads(text) | {"schema": 2}


def test_a_run_that_was_not_watched_has_facts_too() -> None:
    facts = RunFacts.from_json({"schema": 2, "steps": 0})
    assert facts == RunFacts()
    assert RunFacts.from_json(facts.to_json()) == facts


def test_a_column_of_another_type_is_named() -> None:
    value = load("run")
    value["optimizers"][0]["series"]["loss"] = "all of them"
    with pytest.raises(FactsError) as caught:
        RunFacts.from_json(value, "runs/a/facts.json")
    assert str(caught.value) == (
        "runs/a/facts.json: optimizers[0].series.loss: expected a list, got the text 'all of them'"
    )


def test_calls_carry_the_number_of_their_step() -> None:
    for sampled in RunFacts.from_json(load("run")).sampled_steps:
        assert all(call.step == sampled.step for call in sampled.calls.losses)


def test_events_are_typed_by_their_kind() -> None:
    kinds = {type(event) for event in RunFacts.from_json(load("run")).events}
    assert {NonFiniteLossEvent, SpikeEvent} <= kinds


def test_a_loss_that_was_never_read_is_none() -> None:
    value = load("run")
    value["sampled_steps"][0]["roots"][0]["value"] = "tensor(0.5, device='cuda:0')"
    assert RunFacts.from_json(value).sampled_steps[0].backward_calls[0].value is None


def test_settings_of_a_group_are_typed() -> None:
    group = GroupSettings(values={"lr": 1, "betas": [0.9, 0.99], "maximize": True, "momentum": False, "mode": "x"})
    assert (group.lr, group.betas, group.maximize, group.momentum, group.eps) == (1, [0.9, 0.99], True, None, None)


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_sentence(cls: type[Facts]) -> None:
    if cls is Facts:
        return
    assert dataclasses.is_dataclass(cls)
    assert not inspect.getsource(cls).startswith("@"), "facts make themselves dataclasses"
    lines = [line.strip() for line in inspect.getsource(cls).splitlines()]
    for field in cls.__annotations__:
        if field == "TAG":
            continue
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{field}: "))
        assert lines[at + 1].startswith('"""'), f"{cls.__name__}.{field} has no sentence under it"


def test_the_facts_of_an_experiment_on_an_incident_are_written_key_by_key_as_before() -> None:
    head = '{"change": "tiny-batch", "acted": 1, "problem": "", "notes": [], "skipped": [], "refused": null, '
    head += '"outside": [], "ended": "rows", "seen": {"devices": ["cpu"], "has_state": true, "dtypes": []}'
    first = '{"loss": "nan", "grad_norm": null, "lr": 0.1, "applied": false, "skipped": true, "captured_rows": 0}'
    second = '{"loss": 1.5, "grad_norm": "inf", "lr": null, "applied": true, "skipped": false}'
    rows = '{"of": 8, "tries": 3, "draws": {"random": true, "tries": 10, "failed": 10}, "ahead": false, '
    rows += '"fails": null, "single": [3], "together": [[0, 1]], "everywhere": false, "done": false, '
    rows += '"microbatch": null, "narrowed": [0, 3]}'
    inside = f'"trail": [{first}, {second}], "open": ["nan", 2.0], "state": {{}}, '
    inside += f'"batch": {{"nonfinite": 1, "handed_out": true}}, "rows": {rows}, "why_not": "a single row"'
    for text in (f"{head}, {inside}}}", f"{head}}}", f'{head}, "trail": [], "open": [], "state": {{"w": 2}}}}'):
        assert json.dumps(ExperimentFacts.from_json(json.loads(text)).to_json()) == text

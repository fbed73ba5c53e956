"""What goes in, from recorded facts: each cause is claimed, and what only looks like it is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recorded import SITE, described, falling, look, moves, run
from surefoot.diagnose.rules import data
from watched import CLASSES, LOOP, NET

if TYPE_CHECKING:
    from watched import Nursery


def model_pass(step: int = 0, size: float = 1.0, **more: Any) -> dict[str, Any]:
    features = {"count": 32, "mean": [0.0] * 4, "std": [size] * 4}
    base = {"model": "net", "step": step, "grad": True, "grad_mode": True, "site": SITE, "features": features}
    return base | {"inputs": [described(-3 * size, 3 * size)], "outputs": [described(-1, 1)]} | more


# ── values that are not finite ───────────────────────────────────────────────────────────────────────────────────────

NAN_LOSS = {
    "event": "nonfinite-loss", "step": 12, "value": "nan", "kind": "data", "op": "Mm", "tensor": "self", "nan": 3,
    "inf": 0, "shape": [64, 8], "rows": [5], "bad_rows": 1, "site": SITE, "call": "matmul",
}  # fmt: skip


def test_a_nan_that_came_with_the_data_is_named_with_its_row() -> None:
    claim = data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[NAN_LOSS]))
    assert claim is not None
    assert claim.step == 12
    assert "row 5" in claim.summary


COMPILED_LOSS = {
    "event": "nonfinite-loss", "step": 12, "value": "nan", "kind": "data", "tensor": "input",
    "argument": "image", "call": "Net", "site": SITE, "shape": [64, 8], "dtype": "float32", "largest": "nan",
}  # fmt: skip


def test_a_nan_that_went_into_a_compiled_model_is_named_with_its_argument() -> None:
    claim = data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[COMPILED_LOSS]))
    assert claim is not None
    assert claim.step == 12
    assert f"argument `image` of shape (64, 8) that the compiled `Net` is given at {SITE}" in claim.summary
    assert "already contains NaN," in claim.summary
    rows = COMPILED_LOSS | {"nan": 2, "inf": 1, "rows": [5], "bad_rows": 1}
    claim = data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[rows]))
    assert claim is not None
    assert "2 NaN and 1 Inf in 1 of 64 rows (first: row 5)" in claim.summary


def test_a_nan_of_a_half_precision_argument_is_one_although_it_was_not_counted() -> None:
    half = COMPILED_LOSS | {"dtype": "float16"}
    assert data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[half])) is not None
    assert data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[half | {"largest": "inf"}])) is None


def test_what_went_in_after_the_loss_had_left_all_bounds_is_not_the_datas() -> None:
    assert data.nonfinite_input(run([1.0] * 6 + [1e4] * 6 + [math.nan], events=[COMPILED_LOSS])) is None


def test_a_nan_made_by_an_operation_is_not_the_datas() -> None:
    event = NAN_LOSS | {"kind": "operation", "op": "Log"}
    assert data.nonfinite_input(run([1.0] * 12 + [math.nan], events=[event])) is None


def test_a_mask_of_minus_infinity_is_not_a_bad_input() -> None:
    mask = described(0.0, 0.0, nonfinite=10)
    facts = look(0, passes=[model_pass(inputs=[mask])])
    assert (
        data.nonfinite_input(run([math.nan] * 9, sampled_steps=[facts], events=[NAN_LOSS | {"kind": "unknown"}]))
        is None
    )


# ── labels and ids ───────────────────────────────────────────────────────────────────────────────────────────────────


def crash(call: str, message: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "IndexError", "message": message, "site": SITE, "call": call, "arguments": arguments}


def test_labels_that_count_from_one_are_named_with_their_range() -> None:
    logits = described(-1, 1, shape=[20, 3])
    died = crash(
        "cross_entropy", "Target 3 is out of bounds.", input=logits, target={"shape": [20], "min": 1, "max": 3}
    )
    claim = data.label_crash(run(crash=died))
    assert claim is not None
    assert "subtract 1" in claim.fixes[0]
    assert data.token_crash(run(crash=died)) is None


def test_another_error_in_the_loss_is_not_about_labels() -> None:
    logits = described(-1, 1, shape=[20, 3])
    died = crash("cross_entropy", "expected batch size 20", input=logits, target={"shape": [19], "min": 0, "max": 2})
    assert data.label_crash(run(crash=died)) is None


def test_ids_beyond_the_table_are_named() -> None:
    died = crash(
        "embedding",
        "index out of range in self",
        input={"shape": [50], "min": 11, "max": 251},
        weight={"shape": [220, 8]},
    )
    claim = data.token_crash(run(crash=died))
    assert claim is not None
    assert claim.evidence == {"lowest": 11, "highest": 251, "rows": 220}
    assert data.label_crash(run(crash=died)) is None


def folded(source: Any) -> list[dict[str, Any]]:
    clamp = {"op": "clamp", "site": SITE, "changed": 0.1, "highest": 99, "kept": 63, "source": source}
    return [look(3, notes={"folded_ids": [clamp], "embeddings": [{"rows": 64, "highest": 63}]})]


def test_ids_clamped_into_the_table_are_a_mismatch() -> None:
    assert data.token_forced(run(sampled_steps=folded(None))) is not None


def test_clamped_relative_positions_are_fine() -> None:
    assert data.token_forced(run(sampled_steps=folded({"op": "sub"}))) is None


# ── scale ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_large_inputs_in_a_run_that_fails_are_unscaled() -> None:
    facts = [look(0, passes=[model_pass(size=800.0)])]
    claim = data.unscaled_input(run([9.0, *[0.69] * 99], sampled_steps=facts)) or data.unscaled_input(
        run([0.69] * 100, sampled_steps=facts)
    )
    assert claim is not None
    assert claim.step == 0


def test_images_of_bytes_are_to_be_divided_by_255() -> None:
    images = model_pass(size=80.0, inputs=[described(0.0, 255.0, shape=[32, 3, 8, 8])])
    claim = data.unscaled_input(run([0.69] * 100, sampled_steps=[look(0, passes=[images])]))
    assert claim is not None
    assert "images with values from 0 to 255" in claim.summary
    assert claim.fixes == ("Divide the images by 255 before they reach `net`.",)


def test_small_inputs_are_not_why_steps_are_larger_than_the_weights() -> None:
    def looks(ratio: float) -> list[dict[str, Any]]:
        return [look(0, passes=[model_pass(size=0.005)], steps=moves(ratio)), look(1, steps=moves(ratio))]

    assert data.unscaled_input(run([0.69] * 100, sampled_steps=looks(1e-3))) is not None
    assert data.unscaled_input(run([0.69] * 100, sampled_steps=looks(40.0))) is None


def test_large_inputs_are_fine_where_the_run_learns() -> None:
    assert data.unscaled_input(run(falling(), sampled_steps=[look(0, passes=[model_pass(size=800.0)])])) is None


def test_large_inputs_that_only_make_the_first_losses_high_are_mentioned(watch: Nursery) -> None:
    large = CLASSES.replace("torch.randn(256, 8)", "60 * torch.randn(256, 8)")
    run = watch(large, NET, "loss_of = F.cross_entropy\n", LOOP.replace("range(60)", "range(200)"))
    assert run.causes == []
    assert run.finding("data.unscaled-input").severity == "info"


def test_large_inputs_are_fine_before_a_normalising_layer() -> None:
    notes = {"norms": [{"op": "batch_norm", "index": 1}], "layers": [{"op": "linear", "index": 2}]}
    facts = [look(0, passes=[model_pass(size=800.0)], notes=notes)]
    assert data.unscaled_input(run([0.69] * 100, sampled_steps=facts)) is None

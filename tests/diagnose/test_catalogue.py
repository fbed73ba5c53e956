"""The catalogue is complete, refers only to itself, and says something in every field."""

import re
import sys
from pathlib import Path

import pytest

import patience
import surefoot
from surefoot.diagnose.catalogue import CATALOGUE, FAMILIES, nearest_codes, to_markdown

CODES = [  # as users' scripts know them; a new cause need not be added here
    "data.nonfinite-input",
    "data.unscaled-input",
    "data.bad-batch",
    "data.unshuffled",
    "data.repeated-batches",
    "data.label-out-of-range",
    "data.token-mismatch",
    "data.labels-uninformative",
    "data.class-collapse",
    "data.split-mismatch",
    "data.leakage",
    "loss.softmax-before-cross-entropy",
    "loss.sigmoid-before-bce-logits",
    "loss.logits-into-probability-loss",
    "loss.sign-flipped",
    "loss.broadcast",
    "loss.bounded-output",
    "loss.undefined-op",
    "loss.no-valid-targets",
    "loss.sum-reduction",
    "loss.term-dominates",
    "mask.fully-masked-row",
    "mask.leaks-future",
    "init.too-large",
    "init.too-small",
    "init.symmetric",
    "model.dead-units",
    "model.saturated-units",
    "model.vanishing-gradient",
    "model.exploding-gradient",
    "model.batchnorm-tiny-batch",
    "model.eval-mode-training",
    "model.train-mode-eval",
    "model.unregistered-parameters",
    "model.attention-logit-growth",
    "lr.too-high",
    "lr.too-low",
    "lr.no-warmup",
    "lr.schedule-broken",
    "optim.missing-zero-grad",
    "optim.no-update",
    "optim.parameters-missing",
    "optim.frozen-parameters",
    "optim.detached-graph",
    "optim.stale-state",
    "optim.epsilon",
    "optim.weight-decay",
    "clip.saturated",
    "clip.before-unscale",
    "accum.not-divided",
    "accum.uneven-microbatches",
    "precision.fp16-overflow",
    "precision.fp16-underflow",
    "precision.low-precision-weights",
    "precision.scaler-stuck",
    "memory.graph-retained",
    "dist.replicas-diverged",
    "dist.gradients-not-averaged",
    "dist.scale-disagrees",
    "resume.state-missing",
    "resume.data-replayed",
    "repro.unseeded",
    "rl.kl-blowup",
    "rl.entropy-collapse",
    "rl.ratio-explosion",
    "rl.zero-advantage",
    "rl.reward-scale",
    "gan.discriminator-wins",
    "gan.mode-collapse",
    "hw.silent-corruption",
    "optim.no-gradient",
    "optim.lost-microbatch",
]

causes = pytest.mark.parametrize("cause", CATALOGUE.values(), ids=lambda cause: cause.code)


def test_no_code_of_the_contract_was_renamed():
    """Codes of new causes need not be added here: the list is what users' scripts may already depend on."""
    assert set(CODES) <= set(CATALOGUE)


@causes
def test_what_must_cure_is_among_what_can(cause):
    assert set(cause.must_cure) <= set(cause.cured_by)


def test_a_cause_stands_under_its_own_code_and_in_a_known_family():
    assert all(code == cause.code and cause.family in FAMILIES for code, cause in CATALOGUE.items())
    assert {cause.family for cause in CATALOGUE.values()} == set(FAMILIES)


@causes
def test_look_alikes_exist_and_are_not_the_cause_itself(cause):
    assert cause.look_alikes
    assert len(set(cause.look_alikes)) == len(cause.look_alikes)
    assert set(cause.look_alikes) <= set(CATALOGUE) - {cause.code}


@causes
def test_there_are_two_to_four_fixes_and_each_is_a_sentence(cause):
    assert 2 <= len(cause.fixes) <= 4, f"{cause.code} needs two to four fixes; it has {len(cause.fixes)}"
    assert len(set(cause.fixes)) == len(cause.fixes)
    for fix in cause.fixes:
        wanted = f"a fix of {cause.code} must be a sentence of at least three words: {fix!r}"
        assert fix.endswith("."), wanted
        assert fix[0].isupper() or fix[0] == "`", wanted
        assert len(fix.split()) >= 3, wanted


@causes
def test_symptom_and_evidence_are_sentences_and_differ(cause):
    for text in (cause.symptom, cause.evidence):
        assert text.endswith(".")
        assert text[0].isupper() or text[0] == "`"
        assert 30 <= len(text) <= 330
    assert cause.symptom != cause.evidence
    assert not cause.title.endswith(".")


@causes
def test_what_a_text_names_of_surefoot_is_exported(cause):
    names = re.findall(r"surefoot((?:\.\w+)+)", " ".join((cause.symptom, cause.evidence, *cause.fixes)))
    for name in names:
        *space, last = name[1:].split(".")
        public = getattr(surefoot, space[0]) if space else surefoot
        assert last in public.__all__, name


def test_no_two_causes_share_a_title():
    assert len({cause.title for cause in CATALOGUE.values()}) == len(CATALOGUE)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr.to-high", "lr.too-high"),
        ("too-high", "lr.too-high"),
        ("loss.softmax", "loss.softmax-before-cross-entropy"),
        ("data.leak", "data.leakage"),
        ("broadcast", "loss.broadcast"),
    ],
)
def test_a_misspelt_code_finds_the_one_that_was_meant(typed, meant):
    assert meant in nearest_codes(typed)


def test_a_word_unlike_any_code_finds_none():
    assert nearest_codes("nonsense.code") == []


def test_nonsense_finds_nothing():
    assert nearest_codes("") == []
    assert nearest_codes("zzzzqqqq") == []


def test_the_catalogue_imports_the_standard_library_only():
    code = "import sys; import surefoot.diagnose.catalogue; "
    code += "assert not {'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)"
    patience.run([sys.executable, "-c", code], check=True)


def test_the_page_in_the_docs_is_the_catalogue():
    page = Path(__file__).parents[2] / "docs" / "causes.md"
    written = page.read_text(encoding="utf-8")
    assert written == to_markdown(), "run: make causes"

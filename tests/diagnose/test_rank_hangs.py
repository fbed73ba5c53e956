"""`dist.hang`: the odd rank, its step and its line, from the files that the ranks left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.diagnose.catalogue import CATALOGUE
from surefoot.diagnose.findings import Diagnosis, Finding
from surefoot.diagnose.merged import RankDiagnosis, merge
from surefoot.diagnose.rank_hangs import HangRule, hang_claims
from surefoot.record.heartbeat import Beat, BeatFile, ended, mark_end
from surefoot.record.rank_peers import Hang, write_hang

KINDS = {"device.out-of-memory": 5, "lr.too-high": 2}
HANG = Hang("stands", [1], 40, "data.py:7", "rank 1 has not moved for 31 s", 31.0, 1, 0, "train.py:9", time=50.0)


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    monkeypatch.setattr("surefoot.diagnose.rank_hangs.EVIDENCE_RANK", {"crash": 5})


def finding(cause, severity="error"):
    return Finding(cause, severity, 0.8, f"{cause} happened.", 40)


def said(*findings):
    return Diagnosis("broken" if findings else "healthy", 40, findings)


def claim(top, ranks, *beats):
    """What is claimed of these ranks; those without a diagnosis left none."""
    folders = [top / f"rank{beat.rank}" for beat in beats]
    for folder, beat in zip(folders, beats, strict=True):
        folder.mkdir()
        BeatFile(folder).write(beat)
    found = hang_claims(folders, ranks, KINDS)
    return found[0][1] if found else None


LEFT = said(finding("dist.collective-failed"))
ENDED = {"movement": "ended", "code": 1, "step": 40}


def test_a_hang_that_nothing_followed_names_the_rank_and_its_line(tmp_path):
    write_hang(tmp_path, HANG)
    found = claim(tmp_path, {}, Beat(0, 2, step=40), Beat(1, 2, step=40))
    assert (found.severity, found.step, found.where) == ("error", 40, ("rank 1", "data.py:7"))
    assert found.evidence["stacks"] == "rank1/stacks.txt"
    assert found.fixes[0].startswith("Look at data.py:7")


@pytest.mark.parametrize("over_after", [60.0, None], ids=["noted", "seen from its later steps"])
def test_a_hang_after_which_the_rank_continued_is_a_remark(tmp_path, over_after):
    write_hang(tmp_path, replace(HANG, over_after=over_after))
    assert claim(tmp_path, {}, Beat(0, 2, step=90), Beat(1, 2, step=90)).severity == "info"


def test_a_hang_of_an_earlier_run_in_the_folder_counts_for_nothing(tmp_path):
    write_hang(tmp_path, HANG)
    assert claim(tmp_path, {}, Beat(0, 2, began=60.0), Beat(1, 2, began=60.0)) is None


def test_a_rank_that_ended_while_the_others_continued_is_the_cause_of_their_failed_collectives(tmp_path):
    last = ended(Beat(1, 2, step=40, where="train.py:14"), 0, "exit code 0 at train.py:14")
    mark_end(tmp_path, last)
    found = claim(tmp_path, {0: LEFT, 1: said()}, Beat(0, 2, **ENDED), last)
    assert (found.evidence["rank"], found.where) == (1, ("rank 1", "train.py:14"))
    assert "same number of steps" in found.fixes[0]
    merged = merge([RankDiagnosis(0, LEFT), RankDiagnosis(1, said())], hang_claims_of(tmp_path), 2)
    assert [each.cause for each in merged.serious] == ["dist.hang"]
    assert {each.cause for each in merged.findings} == {"dist.hang", "dist.collective-failed"}


def hang_claims_of(top):
    return hang_claims([top / "rank0", top / "rank1"], {0: LEFT, 1: said()}, KINDS)


def test_a_rank_that_ended_by_a_cause_of_its_own_leaves_the_word_to_that(tmp_path):
    last = ended(Beat(1, 2), 1, "OutOfMemoryError: no")
    mark_end(tmp_path, last)
    ranks = {0: LEFT, 1: said(finding("device.out-of-memory"))}
    assert claim(tmp_path, ranks, Beat(0, 2, **ENDED), last) is None


def test_a_rank_that_ended_first_in_a_healthy_run_is_nothing(tmp_path):
    last = ended(Beat(1, 2), 0, "at the end of the script, exit code 0")
    mark_end(tmp_path, last)
    assert claim(tmp_path, {0: said(), 1: said()}, Beat(0, 2, **ENDED), last) is None


def test_a_rank_that_never_came_to_its_end_was_killed(tmp_path):
    killed = Beat(1, 2, step=38, where="train.py:9", process=77, host="node3")
    found = claim(tmp_path, {0: LEFT}, Beat(0, 2, **ENDED), killed)
    assert (found.evidence["kind"], found.evidence["rank"], found.evidence["last_reported_step"]) == ("gone", 1, 38)
    assert found.step == 40, "where the collective of the other rank failed: the report of this one is seconds old"
    assert "process 77 on node3 was killed or aborted" in found.summary
    assert "under a condition on the rank" in found.fixes[0], "gloo aborts a rank whose collective has another size"
    assert "failed after 40 steps; the last report of rank 1 is from step 38, in train.py:9" in found.summary


def test_the_steps_of_a_run_are_those_that_the_hang_names_if_the_facts_are_older(tmp_path):
    write_hang(tmp_path, HANG)
    hang = claim(tmp_path, {}, Beat(0, 2, step=40), Beat(1, 2, step=40))
    ranks = [RankDiagnosis(rank, Diagnosis("unknown", 1, ())) for rank in range(2)]
    merged = merge(ranks, [(HangRule(), hang)], 2)
    assert (merged.verdict, merged.steps) == ("broken", 40)


def test_ranks_that_still_run_or_left_no_files_are_nothing(tmp_path):
    assert claim(tmp_path, {0: said(), 1: said()}, Beat(0, 2), Beat(1, 2)) is None
    assert hang_claims([tmp_path / "rank7"], {}, KINDS) == []
    assert "dist.hang" in CATALOGUE

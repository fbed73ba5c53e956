"""One table of versioned formats; a file of a newer version gives one clear error, whichever format it has."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import surefoot as sf
from goldens.loops import FEATURES, Loop
from goldens.version_files import STATE_FEATURE, unpack
from surefoot.__main__ import main
from surefoot.core import formats
from surefoot.core.formats import FORMATS, Format
from surefoot.keep.checkpoint import manifest as manifest_file
from surefoot.keep.position.data import DataPosition
from surefoot.record.follow import RunFollower
from surefoot.record.heartbeat import BeatFile, first_beat, read_beat
from surefoot.record.incidents.reading import read_incident
from surefoot.record.rank_file import read_rank
from surefoot.record.rank_peers import read_hang
from surefoot.report.page.serve import LiveServer

ROOT = Path(__file__).parents[2]


# ---- the table ----------------------------------------------------------------------------------------------------


def two_old_versions():
    """A format at version 3 that reads version 2 and 3."""
    return replace(formats.FACTS, version=3, migrations={2: lambda value: value | {"schema": 3, "new": value["old"]}})


@pytest.mark.parametrize(
    ("found", "way_out"),
    [
        (4, "It was written by a newer version of surefoot: use that version or a later one"),
        (1, "It was written by an older version of surefoot: use that version"),
        (0, "not a version number"),
        (-1, "not a version number"),
        (True, "not a version number"),
        (2.0, "not a version number"),
        ("3", "not a version number"),
        (None, "not a version number"),
    ],
)
def test_what_cannot_be_read_is_reported_with_what_was_found_what_is_read_and_the_way_out(found, way_out):
    with pytest.raises(sf.UsageError) as refused:
        two_old_versions().read({"schema": found}, "here.json")
    assert str(refused.value).startswith(f"here.json is of schema {found!r}; this surefoot reads schema 2 to 3. ")
    assert way_out in str(refused.value)


def test_an_older_version_is_migrated_step_by_step_and_the_current_one_is_left_alone():
    known = two_old_versions()
    assert known.read({"schema": 2, "old": 7}, "here") == {"schema": 3, "old": 7, "new": 7}
    current = {"schema": 3}
    assert known.read(current, "here") is current
    further = replace(known, version=4, migrations={**known.migrations, 3: lambda value: value | {"schema": 4}})
    assert further.read({"schema": 2, "old": 7}, "here") == {"schema": 4, "old": 7, "new": 7}


def test_a_migration_that_leads_nowhere_makes_nothing_readable():
    gap = replace(formats.FACTS, version=4, migrations={1: dict, 3: dict})
    assert gap.readable == "3 to 4"
    assert gap.problem(1)


def test_what_names_no_version_is_refused_unless_it_has_one_by_agreement():
    with pytest.raises(sf.UsageError, match="schema None"):
        formats.FACTS.read({}, "here")
    assert formats.RUN.read({}, "here", unmarked=1) == {}
    assert formats.FACTS.read({"looks": []}, "here", unmarked=1) == {"sampled_steps": [], "schema": 2}
    with pytest.raises(ValueError, match="here is of schema None"):
        formats.FACTS.read([1], "here", ValueError, unmarked=1)


def test_every_format_of_the_module_is_in_the_table_once():
    assert [each for each in vars(formats).values() if isinstance(each, Format)] == list(FORMATS)
    assert len({each.name for each in FORMATS}) == len(FORMATS)


def test_no_other_module_keeps_a_version_of_its_own():
    literal = re.compile(r'"schema": \d|^\s*_?(SCHEMA|VERSION|FORMAT_VERSION) *(: *int)? *= *\d', re.MULTILINE)
    sources = [
        path for path in (ROOT / "src" / "surefoot").rglob("*.py") if path.parts[-3] not in ("tuning", "testing")
    ]
    assert [path.name for path in sources if literal.search(path.read_text(encoding="utf-8"))] == []


def test_the_docs_show_this_table():
    rows = [
        f"| {each.name} | {each.version} | {each.place} | {each.written_by} | {each.read_by or 'other programs'} |\n"
        for each in FORMATS
    ]
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    shown = re.search(r"\|---\|---\|---\|---\|---\|\n((?:\|.*\n)*)", page)
    assert shown is not None
    assert shown[1] == "".join(rows)


# ---- a newer version of each --------------------------------------------------------------------------------------


def refusal(call):
    """The message of the one error that a call ends with."""
    with pytest.raises(sf.SurefootError) as refused:
        call()
    return str(refused.value)


def command(*words):
    """What a command says when it refuses: one line, exit code 2."""
    said, argv, sys.argv = io.StringIO(), sys.argv, ["surefoot", *map(str, words)]
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = argv
    assert end.value.code == 2
    (line,) = said.getvalue().splitlines()
    return line


def newer(path, known):
    """Raise the version in a JSON file by one."""
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(value | {known.key: known.version + 1}), encoding="utf-8")


def checkpoint(folder):
    (place,) = unpack("checkpoints", folder).glob("plain/checkpoints/*")
    content = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    del content["checksum"]
    (place / "manifest.json").write_bytes(manifest_file.rendered(content | {"schema": formats.CHECKPOINT.version + 1}))
    yield refusal(lambda: sf.CheckpointManager(folder / "plain").load())
    yield refusal(lambda: sf.CheckpointManager(folder / "plain").load(5))
    loop = Loop(FEATURES["plain"], folder / "plain")
    yield refusal(lambda: next(loop.batches()))


def stabilizer_state(folder):
    stabilizer = Loop(STATE_FEATURE, folder).stabilizer
    state = stabilizer.state_dict()
    yield refusal(lambda: stabilizer.load_state_dict(state | {"schema": state["schema"] + 1}))


def data_position(folder):
    state = torch.load(unpack("states", folder) / "data_position.pt", weights_only=True)
    yield refusal(lambda: DataPosition().load_state_dict(state | {"schema": state["schema"] + 1}))


def run_log(folder):
    path = unpack("run_log", folder) / "telemetry" / "session-001.jsonl"
    path.write_text(json.dumps({"schema": formats.RUN_LOG.version + 1, "pid": 1, "time": 0.0}) + "\n")
    yield refusal(lambda: sf.load_run(folder))
    yield refusal(RunFollower(folder).poll)
    for name in ("report", "watch"):
        yield command(name, folder)


def run_description(folder):
    newer(unpack("run", folder) / "run.json", formats.RUN)
    yield command("diagnose", folder)
    yield refusal(lambda: sf.load_run(folder))


def facts(folder):
    newer(unpack("run", folder) / "facts.json", formats.FACTS)
    yield command("diagnose", folder)


def findings(folder):
    unpack("run_log", folder)
    newer(unpack("run", folder) / "findings.json", formats.FINDINGS)
    yield refusal(lambda: sf.load_run(folder))
    for name in ("report", "watch"):
        yield command(name, folder)


def rank(folder):
    for number in range(2):
        unpack("run", folder / f"rank{number}")
        (folder / f"rank{number}" / "rank.jsonl").write_text(
            json.dumps({"kind": "setup", "schema": formats.RANK.version + 1}) + "\n"
        )
    yield refusal(lambda: list(read_rank(folder / "rank0")))
    yield command("diagnose", folder)


def heartbeat(folder):
    for number in range(2):
        unpack("run", folder / f"rank{number}")
    BeatFile(folder / "rank1").write(first_beat(1, 2))
    newer(folder / "rank1" / "alive.json", formats.HEARTBEAT)
    yield refusal(lambda: read_beat(folder / "rank1", strict=True))
    yield command("diagnose", folder)


def hang(folder):
    for number in range(2):
        unpack("run", folder / f"rank{number}")
    (folder / "hang.json").write_text(json.dumps({"schema": formats.HANG.version + 1}))
    yield refusal(lambda: read_hang(folder, strict=True))
    yield command("diagnose", folder)


def incident(folder):
    (place,) = unpack("incident", folder).glob("incidents/*")
    newer(place / "incident.json", formats.INCIDENT)
    yield refusal(lambda: read_incident(place))
    yield command("replay", place)


def experiments(folder):
    unpack("run_log", folder / "baseline")
    (folder / "bisect.json").write_text(json.dumps({"schema": formats.EXPERIMENTS.version + 1}))
    yield command("report", folder)


def standardizer(folder):
    path = folder / "scale.json"
    sf.Standardizer.fit(torch.arange(6.0).reshape(3, 2)).save(path)
    newer(path, formats.STANDARDIZER)
    with pytest.raises(ValueError, match="of version") as refused:
        sf.Standardizer.load(path)
    yield str(refused.value)


def mutant_runs(folder):
    path = folder / "runs.jsonl"
    path.write_text(json.dumps({"schema": formats.MUTANTS.version + 1}) + "\n")
    yield command("zoo", "mutate", "--operators", "drop-step", "--half", "testing", "--limit", "1", "--json", path)


READ_AGAIN = {
    each.__name__.replace("_", " "): each
    for each in (
        *(checkpoint, stabilizer_state, data_position, run_log, run_description),
        *(facts, findings, rank, heartbeat, hang, incident, experiments, standardizer, mutant_runs),
    )
}


def test_every_format_that_is_read_again_is_tried():
    assert set(READ_AGAIN) == {each.name for each in FORMATS if each.read_by}


@pytest.mark.parametrize("known", [each for each in FORMATS if each.read_by], ids=lambda known: known.name)
def test_a_newer_version_is_refused_with_one_clear_error(known, tmp_path):
    for message in READ_AGAIN[known.name](tmp_path):
        assert f"is of {known.key} {known.version + 1}; this surefoot reads {known.key} {known.readable}. " in message
        assert "It was written by a newer version of surefoot: use that version or a later one." in message


def test_a_live_page_shows_the_error_in_its_place(tmp_path):
    import threading
    from urllib.error import HTTPError
    from urllib.request import urlopen

    newer(unpack("run", tmp_path) / "findings.json", formats.FINDINGS)
    unpack("run_log", tmp_path)
    with LiveServer(tmp_path, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(HTTPError) as refused:
                urlopen(server.url)
            with refused.value as answer:
                assert "is of schema 2; this surefoot reads schema 1." in answer.read().decode()
        finally:
            server.shutdown()
            thread.join()

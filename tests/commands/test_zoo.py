"""`surefoot zoo`: its list and its refusals; scoring itself is in tests/zoo."""

import pytest


def test_the_list_can_be_narrowed_to_a_half_and_a_name(command):
    every = command("zoo", "list").out.splitlines()
    tuning = command("zoo", "list", "--half", "tuning", "--only", "lr.too-high").out.splitlines()
    assert len(every) > 100
    assert tuning
    assert all("lr.too-high" in name for name in tuning)
    assert set(tuning) < set(every)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--half", "third"], "--half must be tuning, testing, both or ranks; got 'third'"),
        (["score", "--seeds", "one"], "--seeds must be integers"),
        (["score", "--from", ".", "--keep", "x"], "--keep and --from cannot be combined"),
        (["score", "--device", "meta"], "no device 'meta' here: torch "),
        (["score", "--device", "turbo"], "no device 'turbo' here: torch "),
        (["score", "--device", "cpu:0", "--from", "."], "--device and --from cannot be combined"),
        (["run", "no-such-script"], "surefoot zoo list"),
        ([], "`surefoot zoo` needs one of list, run, score, mutate"),
    ],
)
def test_wrong_use_is_one_line_with_the_way_out(command, arguments, words):
    answer = command("zoo", *arguments)
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.error.splitlines()
    assert words in line

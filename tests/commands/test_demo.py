"""`surefoot demo` as a command."""


def test_fewer_steps_than_the_faults_need_are_refused(command):
    answer = command("demo", "--steps", 10)
    assert (answer.code, answer.out) == (2, "")
    assert "--steps" in answer.error

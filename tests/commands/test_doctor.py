"""`surefoot doctor TARGET` as a command: its JSON, its exit code, its refusals."""

import json


def test_a_target_that_is_not_there_is_one_line_and_exit_code_2(command):
    answer = command("doctor", "no_such_module_anywhere:build")
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.error.splitlines()
    assert "no_such_module_anywhere" in line


def test_a_failed_check_is_exit_code_1_and_what_the_target_prints_stays_out_of_the_json(command, tmp_path):
    (tmp_path / "target.py").write_text(
        "import torch\n"
        "def build():\n"
        "    print('from the target')\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    data = [(torch.full((4, 2), float('nan')), torch.zeros(4, 1))] * 4\n"
        "    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()\n"
        "    return model, data, loss, torch.optim.SGD(model.parameters(), lr=0.1)\n"
    )
    answer = command("doctor", f"{tmp_path / 'target.py'}:build", "--json", "--seconds", 5)
    found = json.loads(answer.out)
    assert answer.code == 1
    assert "from the target" in answer.error
    assert any(check["status"] == "fail" for check in found["checks"])

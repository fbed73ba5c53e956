"""A script cannot tell `surefoot run` from `python`: same output, same exit code, same traceback."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import running
from running import ENVIRONMENT, python, surefoot

from patience import HANG_SECONDS

both = partial(running.both, fresh=True)

WITHOUT_TORCH = {
    "argparse": """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--out"); parser.add_argument("-m"); parser.add_argument("rest", nargs="*")
        print(parser.parse_args(), parser.prog)
    """,
    "argparse_refuses": """
        import argparse
        argparse.ArgumentParser().parse_args(["--nonsense"])
    """,
    "the_names_in_main": """
        import sys
        print(sorted(globals()), __name__, __spec__, __package__, __file__, sys.argv, type(__loader__).__name__)
        print(sys.modules["__main__"].__dict__ is globals(), sys.path[0])
    """,
    "annotations": "x: int = 1\nprint(__annotations__)",
    "exit_with_a_number": "import sys; print('so'); sys.exit(7)",
    "exit_with_a_large_number": "raise SystemExit(259)",
    "exit_with_a_negative_number": "raise SystemExit(-1)",
    "exit_with_words": "import sys; sys.exit('no such dataset')",
    "exit_with_nothing": "import sys; print('so'); sys.exit()",
    "exit_with_none": "raise SystemExit(None)",
    "exit_with_true": "raise SystemExit(True)",
    "an_exception": """
        def inner(): raise ValueError("what")
        def outer():
            try: inner()
            except ValueError as error: raise KeyError("why") from error
        print("before")
        outer()
    """,
    "a_syntax_error": "print('never')\nx = = 1\n",
    "an_indentation_error": "if True:\nprint(1)\n",
    "another_excepthook": """
        import sys
        def hook(kind, error, trace):
            count = 0
            while trace: count += 1; trace = trace.tb_next
            print("caught", kind.__name__, error, count)
        sys.excepthook = hook
        raise RuntimeError("seen")
    """,
    "an_excepthook_that_fails": """
        import sys
        def hook(kind, error, trace): raise OSError("the hook")
        sys.excepthook = hook
        raise RuntimeError("the script")
    """,
    "os_exit": "import os, sys; print('flushed', flush=True); print('lost'); os._exit(4)",
    "os_exit_in_a_child": """
        import os
        child = os.fork()
        if not child: os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "a_forked_child_that_ends": """
        import os, sys
        print("once", flush=True)
        if not os.fork(): sys.exit(0)
        os.wait(); print("parent")
    """,
    "reads_stdin": "import sys\nfor line in sys.stdin: print(line.strip()[::-1])",
    "pickles_itself": """
        import pickle
        class Config:
            def __init__(self): self.x = 1
        print(pickle.loads(pickle.dumps(Config())).x, Config.__module__)
    """,
    "threads_outlive_main": """
        import threading
        def work():
            threading.main_thread().join()
            print("thread"); threading.Thread(target=lambda: print("its thread")).start()
        threading.Thread(target=work).start()
        print("main")
    """,
    "a_pool_is_left_open": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        print(pool.submit(lambda: 5).result())
    """,
    "atexit": "import atexit; atexit.register(print, 'bye'); print('hi')",
    "atexit_after_a_crash": "import atexit; atexit.register(print, 'bye'); 1 / 0",
    "taken_down_at_the_end": """
        class Held:
            def __del__(self): print("gone")
        held = Held()
        print("end")
    """,
    "warnings": """
        import warnings
        warnings.warn("of mine", DeprecationWarning)
        warnings.warn("of mine", DeprecationWarning)
        warnings.simplefilter("error")
        try: warnings.warn("hard")
        except UserWarning as error: print("raised", error)
    """,
    "a_pool_of_processes": """
        import multiprocessing as mp
        def double(x): return 2 * x
        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                with mp.get_context(way).Pool(1) as pool: print(way, pool.map(double, [1, 2]))
    """,
    "another_stderr": "import sys, io; sys.stderr = io.StringIO(); print('x', file=sys.stderr); print(repr(sys.stderr.getvalue()))",
    "closed_stderr": "import sys; sys.stderr.close(); print('quiet')",
    "changes_folder": "import os; os.chdir('/'); print(os.getcwd())",
    "inspects_itself": "import inspect\ndef f(): return 3\nprint(inspect.getsource(f), __file__)",
    "coding_cookie": "# -*- coding: latin-1 -*-\nprint(len('aé'))",
    "a_name_of_the_standard_library": "import dataclasses, json, pathlib; print(dataclasses.mine, json.mine, pathlib.mine)",
}


def write(folder, text, name="script.py"):
    lines = text.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    (folder / name).write_text("\n".join(line[indent:] for line in lines))
    return name


NOTHING_SEEN = "surefoot: the script did not import torch in this process, so there was nothing to observe"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_script_without_torch_runs_as_under_python(tmp_path, name):
    for module in ("dataclasses", "json", "pathlib") if name == "a_name_of_the_standard_library" else ():
        write(tmp_path, "mine = 'my own'", f"{module}.py")
    plain, watched = both(
        tmp_path, write(tmp_path, WITHOUT_TORCH[name]), "--out", "x", "-m", "y", "a b", given="one\ntwo\n"
    )
    assert watched.stderr.removeprefix(plain.stderr).strip() in ("", NOTHING_SEEN)
    if name != "a_name_of_the_standard_library":  # with a `json.py` like that, nothing can be written
        assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_code"] == watched.returncode


@pytest.mark.parametrize("path", ["sub/script.py", "./sub/script.py", "sub/../sub/script.py", "sub/link.py"])
def test_siblings_are_found_and_the_path_is_reported_as_by_python(tmp_path, path):
    (tmp_path / "sub").mkdir()
    write(tmp_path, "import helper, sys; print(helper.x, __file__, sys.argv[0], sys.path[0]); 1 / 0", "sub/script.py")
    write(tmp_path, "x = 5", "sub/helper.py")
    (tmp_path / "sub" / "link.py").symlink_to("script.py")
    both(tmp_path, path)


def test_a_module_may_import_from_its_own_package(tmp_path):
    (tmp_path / "pkg").mkdir()
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, "x = 5", "pkg/helper.py")
    write(
        tmp_path,
        "from . import helper; import sys; print(helper.x, __package__, __spec__.name, sys.argv, sys.path[0]); 1 / 0",
        "pkg/mod.py",
    )
    both(tmp_path, "-m", "pkg.mod", "--flag")
    both(tmp_path, "-m", "pkg")


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "json.no_such", "json.decoder.x"])
def test_a_missing_module_is_reported_as_by_python(tmp_path, name):
    both(tmp_path, "-m", name)


def test_a_module_with_a_syntax_error_is_reported_as_by_python(tmp_path):
    write(tmp_path, "x = = 1", "broken.py")
    both(tmp_path, "-m", "broken")


def test_a_missing_file_and_a_folder_are_reported_as_by_python(tmp_path):
    (tmp_path / "empty").mkdir()
    both(tmp_path, "no_such.py")
    assert not (tmp_path / "run" / "run.json").exists()  # of a script that never began there is no run
    both(tmp_path, "empty")
    (tmp_path / "full").mkdir()
    write(
        tmp_path,
        "import sys, beside; print(beside.x, __file__, sys.argv, sys.path[0], __package__)",
        "full/__main__.py",
    )
    write(tmp_path, "x = 6", "full/beside.py")
    both(tmp_path, "full", "a")


def test_a_zip_file_and_stdin_run_as_under_python(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys; print('zipped', sys.argv, __name__)")
    both(tmp_path, "app.zip", "a")
    both(tmp_path, "-", "a", given="import sys; print('typed', sys.argv, __name__)")


def test_a_file_that_may_not_be_read_is_reported_as_by_python(tmp_path):
    write(tmp_path, "print(1)")
    (tmp_path / "script.py").chmod(0)
    if os.access(tmp_path / "script.py", os.R_OK):
        pytest.skip("this user may read everything")
    both(tmp_path, "script.py")


@pytest.mark.parametrize("imports", ["", "import torch"])
def test_an_interrupt_kills_as_it_kills_python(tmp_path, imports):
    # One line, so that both tracebacks name it; short sleeps, because a signal just before a sleep does not end it.
    loop = r"for text in chain(['ready\n'], repeat('')): print(text, end='', flush=True); time.sleep(0.05)"
    write(tmp_path, f"{imports}\nimport time\nfrom itertools import chain, repeat\n{loop}")
    endings = []
    for command in (["script.py"], ["-m", "surefoot", "run", "--out", "run", "script.py"]):
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=HANG_SECONDS)
        errors = re.sub(r"^[ ~^]+\n", "", errors, flags=re.MULTILINE)  # it may be anywhere in the line
        endings.append((process.returncode, out, errors.partition("\nsurefoot: ")[0]))
    assert endings[0] == endings[1]
    assert endings[1][0] == -signal.SIGINT
    assert json.loads((tmp_path / "run" / "run.json").read_text())["error"] == "KeyboardInterrupt"


TRAIN = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = torch.nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
"""

FORWARD = "model = torch.nn.Linear(4, 2)\nmodel(torch.ones(3, 4)).sum().backward()\n"
"""Without an optimizer a process starts in half the time: making the first one imports torch's compiler."""

WITH_TORCH = {
    "an_ordinary_day": """
import importlib.util, io, os, pickle, sys, threading
os.environ["OMP_NUM_THREADS"] = "2"
print(importlib.util.find_spec("torch") is not None, "torch" in sys.modules)
import torch
print(torch.get_num_threads(), torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__)
torch.manual_seed(0)
""" + TRAIN + """
print([step(torch.ones(3, 4)) for _ in range(4)])
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.a = torch.nn.Linear(2, 2)
    def forward(self, x): return self.a(x)
file = io.BytesIO(); torch.save(Net(), file); file.seek(0)
print(torch.load(file, weights_only=False))
for function in (torch.load, torch.save, torch.randperm, torch.nn.utils.clip_grad_norm_, torch.no_grad):
    print(pickle.loads(pickle.dumps(function)) is function)
for x in (torch.ones(3, 5), torch.ones(3, 4), torch.ones(2, 1)):
    try: print(step(x) > 0)
    except RuntimeError as error: print(str(error)[:60])
def work():
    net = torch.nn.Linear(4, 1); other = torch.optim.Adam(net.parameters())
    for _ in range(5): other.zero_grad(); net(torch.ones(2, 4)).sum().backward(); other.step()
    print(net.weight.sum().item())
thread = threading.Thread(target=work); thread.start(); thread.join()
model = torch.compile(model, backend="eager")
print([step(torch.ones(3, 4)) for _ in range(12)])
@torch.compile(backend="eager")
def whole(x): return torch.nn.functional.mse_loss(inner(x), x)
inner = torch.nn.Linear(4, 4)
loss = whole(torch.ones(2, 4)); loss.backward(); print(loss.item(), inner.weight.grad.sum().item())
print(torch._dynamo.utils.counters["frames"], torch._dynamo.utils.counters["graph_break"])
""",
    "workers_forked_and_spawned": """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((4,), float(i * i)), torch.randn(())
def start(worker): torch.manual_seed(worker)
if __name__ == "__main__":
    torch.manual_seed(0)
""" + "".join("    " + line + "\n" for line in TRAIN.strip().split("\n")) + """
    for way in ("fork", "spawn"):
        loader = DataLoader(Squares(), 4, shuffle=True, num_workers=1, multiprocessing_context=way, worker_init_fn=start)
        for x, noise in loader: print(way, x[:, 0], noise, step(x / 50))
""",
    "crashes_in_the_loop": "import torch\ntorch.manual_seed(0)" + TRAIN + "step(torch.ones(3, 4))\nstep(torch.ones(3, 5))",
    "leaves_by_os_exit": "import os, torch\n" + FORWARD + "print('so', flush=True); os._exit(5)",
}  # fmt: skip

CRASHES = {
    "in_backward": (
        "loss = model(torch.ones(3, 4)).sum(); loss.backward()\nloss.backward()\n",
        ("RuntimeError", "second time"),
    ),
    "in_an_operator": ("\nmodel(torch.ones(3, 4)) @ torch.ones(3, 3)", ("RuntimeError", "cannot be multiplied")),
    "in_a_forward_of_its_own": (
        """
class Net(torch.nn.Module):
    def __init__(self): super().__init__(); self.table = torch.nn.Embedding(3, 4)
    def forward(self, ids):
        return self.table(ids).sum()
Net()(torch.tensor([1, 7]))
""",
        ("IndexError", "index out of range"),
    ),
    "for_want_of_memory": (
        "\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')",
        ("OutOfMemoryError", "out of memory"),
    ),
}


@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_script_with_torch_runs_as_under_python(tmp_path, name):
    facts = told_alike(tmp_path, WITH_TORCH[name], fresh=name == "an_ordinary_day")
    assert bool(facts["optimizers"]) is (name != "leaves_by_os_exit")


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_is_reported_as_by_python_and_the_diagnosis_knows_of_it(tmp_path, name):
    line, (kind, words) = CRASHES[name]
    told = told_alike(tmp_path, "import torch\ntorch.manual_seed(0)\n" + FORWARD + line)["crash"]
    assert told["type"] == kind
    assert words in told["message"]
    assert "script.py:" in told["site"]


def told_alike(folder, text, fresh=False):
    """The facts of a watched run that printed and ended as under Python, and has a diagnosis."""
    _, watched = running.both(folder, write(folder, text), fresh=fresh)
    assert "\nsurefoot: " in watched.stderr  # however it ended
    facts = json.loads((folder / "run" / "facts.json").read_text())
    assert facts["problems"] == {}
    assert json.loads((folder / "run" / "findings.json").read_text())["schema"] == 1
    return facts


def test_the_compiler_gives_the_same_code(tmp_path):
    quick = "import torch._inductor.config as c\nc.cpp_cache_precompile_headers = c.cpp.vec_isa_ok = False\n"
    train = "model = torch.compile(model)\nprint(step(torch.ones(3, 4)))\n"
    text = "import torch\ntorch.manual_seed(0)\n" + quick + TRAIN + train
    plain = python(tmp_path, write(tmp_path, text + "print(step(torch.ones(3, 4)))"))
    if plain.returncode:
        pytest.skip("no compiler here")
    watched = surefoot(tmp_path, "script.py")
    assert (watched.stdout, watched.returncode) == (plain.stdout, 0)


def test_what_cannot_be_written_is_said_and_the_script_is_not_affected(tmp_path):
    (tmp_path / "run").write_text("a file is in the way")
    watched = surefoot(tmp_path, write(tmp_path, "import torch\nprint(1)"))
    assert (watched.returncode, watched.stdout) == (0, "1\n")
    assert "cannot write" in watched.stderr
    assert "surefoot: unknown" in watched.stderr

"""Scripts that close descriptors they know nothing of."""

from runlogs import run
from surefoot import load_run


def test_a_script_that_closes_every_descriptor_keeps_its_own_files_and_most_of_its_log(tmp_path):
    code = """
    import os
    log = RunLog(sys.argv[1])
    for step in range(100):
        log.take(step_row(step))
    log.flush(HANG_SECONDS)
    os.closerange(3, 256)
    mine = [os.open(f"{sys.argv[2]}/{i}", os.O_RDWR | os.O_CREAT) for i in range(40)]
    for number in mine:
        os.write(number, b"mine")
    for step in range(100, 200):
        log.take(step_row(step))
        if step % 20 == 0:
            log.flush(HANG_SECONDS)
    log.close()
    for number in mine:
        os.write(number, b" still")
    """
    (tmp_path / "own").mkdir()
    done = run(code, tmp_path / "log", tmp_path / "own")
    assert done.returncode == 0, done.stderr
    assert {path.read_bytes() for path in (tmp_path / "own").iterdir()} == {b"mine still"}
    assert load_run(tmp_path / "log").scalars.num_rows == 200

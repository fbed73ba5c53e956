"""Processes that are killed while they log: the log always opens, and what was flushed is there."""

from runlogs import run

KILLED = """
def log_for_ever(folder, step, limits, acknowledge):
    log = RunLog(folder, limits=limits)
    while True:
        for _ in range(random.randint(1, BURST)):
            log.take(step_row(step))
            log.take(layer_rows(step))
            if step % 50 == 0:
                log.event("spike", step, "a spike", severity="warning")
            step += 1
        if log.flush(5):
            os.write(acknowledge, f"{step - 1}\\n".encode())

def killed_at_a_random_moment(folder, step, limits):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            log_for_ever(folder, step, limits, writer)
        finally:
            os._exit(1)
    os.close(writer)
    said, reached = b"", step - 1
    while reached < step + LEAST:
        more = os.read(reader, 65536)
        assert more, "the child has ended by itself"
        said += more
        reached = max([int(line) for line in said.split(b"\\n")[:-1]], default=step - 1)
    time.sleep(random.uniform(0.0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 65536):
        said += more
    os.close(reader)
    return max([int(word) for word in said.split() if word.isdigit()], default=step - 1)

home, sizes = Path(sys.argv[1]), sys.argv[2]
BURST, LEAST = (30, 20) if sizes == "usual" else (300, 500)
limits = LogLimits() if sizes == "usual" else LogLimits(scalars_bytes=1 << 18, layers_bytes=1 << 19)
torn = thinned = reached = 0
for attempt in range(int(sys.argv[3])):
    random.seed(attempt)
    folder = home / str(attempt // 10)
    step = 0 if attempt % 10 == 0 else flushed + 1
    flushed = killed_at_a_random_moment(folder, step, limits)
    tables = load_run(folder)
    torn += len(tables.problems)
    steps = tables.scalars["step"].to_pylist()
    assert steps == sorted(set(steps))
    assert tables.scalars["loss"].to_pylist() == [loss_at(each) for each in steps]
    layers = tables.layers
    expected = layers["step"].to_numpy() + np.tile(range(5), len(layers) // 5)
    assert np.array_equal(layers["grad_norm"].to_numpy(), expected)
    if flushed >= step:
        assert (flushed in steps, steps[0], flushed in layers["step"].to_pylist()) == (True, 0, True)
        assert {each.step for each in tables.events} >= set(range(0, flushed + 1, 50))
        assert sizes != "usual" or set(range(flushed + 1)) <= set(steps)
        assert set(range(max(0, flushed - 60), flushed + 1)) <= set(steps)
    assert not steps or steps[-1] <= flushed + BURST, "at most what was being written is beyond what was flushed"
    reached, thinned = max(reached, flushed), max(thinned, flushed + 1 - len(steps))
    size = sum(path.stat().st_size for path in (folder / "telemetry").glob("*.arrows"))
    assert sizes == "usual" or size <= (1 << 18) + (1 << 19), size
print(reached, thinned, torn)
"""


def test_a_process_killed_forty_times_while_logging_leaves_all_that_was_flushed(tmp_path):
    done = run(KILLED, tmp_path, "usual", 40)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert int(done.stdout.split()[0]) > 100


def test_a_process_killed_ten_times_while_thinning_loses_nothing_recent_and_stays_small(tmp_path):
    done = run(KILLED, tmp_path, "small", 10)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reached, thinned, _ = map(int, done.stdout.split())
    assert (reached > 1000, thinned > 100) == (True, True), done.stdout

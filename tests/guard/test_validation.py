"""Wrong input to the stabilizer, to `attach` and to the functions beside them: one clear error, at the call."""

import pytest
import torch
from torch import nn

import surefoot as sf
from surefoot.guard.validation import signal_value

NAN = float("nan")
X = torch.randn(4, 2)


def parts():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def stabilizer(**settings):
    return sf.TrainingStabilizer(*parts(), **settings)


@pytest.mark.parametrize("make", [sf.TrainingStabilizer, sf.attach])
@pytest.mark.parametrize("wrong", [3, nn.Linear, [None]])
def test_a_model_that_is_none_is_refused(make, wrong):
    with pytest.raises(sf.SettingError, match=r"`model` must be a torch\.nn\.Module or several; got "):
        make(wrong, parts()[1])


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("accumulate", True),
        ("lag_steps", 1.5),
        ("lag_steps", True),
        ("zero_grad", "no"),
        ("also_save", 3.7),
        ("also_save", "model"),
        ("checker", sf.StabilityChecker),
        ("watch", True),
    ],
)
def test_a_setting_of_the_stabilizer_of_the_wrong_type_is_refused(setting, wrong):
    with pytest.raises(sf.SettingError, match=rf"`{setting}` must .*; got "):
        stabilizer(**{setting: wrong})


@pytest.mark.parametrize("setting", ["checker", "escalation", "recovery", "watch", "on_step", "on_event", "lag_steps"])
@pytest.mark.parametrize("wrong", [3.7, "nonsense", [1]])
def test_a_setting_of_attach_of_the_wrong_type_is_refused(setting, wrong):
    with pytest.raises(sf.SettingError, match=rf"`{setting}` must .*; got "):
        sf.attach(*parts(), **{setting: wrong})


@pytest.mark.parametrize("make", [sf.TrainingStabilizer, sf.attach])
def test_a_lazy_module_is_refused_until_it_has_values(make):
    model = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(sf.SettingError, match=r"'weight' is not initialised yet, .* Run one forward pass"):
        make(model, optimizer)
    model(X)
    make(model, optimizer)


@pytest.mark.parametrize("make", [sf.TrainingStabilizer, sf.attach])
def test_a_model_on_the_meta_device_is_refused(make):
    model = nn.Linear(2, 1, device="meta")
    with pytest.raises(sf.SettingError, match="'weight' is on the meta device and has no values"):
        make(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("wrong", ["a", None, [1], 1j, torch.randn(3), torch.tensor(1j), object()])
def test_a_signal_that_is_not_one_number_is_refused(wrong):
    guarded, (model, optimizer) = stabilizer(), parts()
    attachment = sf.attach(model, optimizer)
    with pytest.raises(sf.UsageError, match="signal 'kl' must be one number; got "):
        guarded.observe(kl=wrong)
    with pytest.raises(sf.UsageError, match="signal 'kl' must be one number; got "):
        attachment.observe(kl=wrong)
    if wrong is not None:
        with pytest.raises(sf.UsageError, match="signal 'loss' must be one number; got "):
            attachment.observe(loss=wrong)


def test_a_signal_of_one_number_is_taken_as_it_is():
    assert signal_value("kl", 3) == 3.0
    assert signal_value("kl", torch.ones(1, 1, requires_grad=True)).shape == ()


@pytest.mark.parametrize("wrong", ["a", 1j, torch.ones(2), [3]])
def test_a_weight_that_is_not_one_number_is_refused(wrong):
    guarded = stabilizer(accumulate=2)
    loss = nn.Linear(2, 1)(X).mean()
    with pytest.raises(sf.UsageError, match="`weight` must be one number"):
        guarded.backward(loss, weight=wrong)


def test_a_complex_loss_is_refused():
    with pytest.raises(sf.UsageError, match="must be a real number"):
        stabilizer().backward(torch.tensor(1j, requires_grad=True))


def test_what_is_called_must_be_a_function_that_returns_the_loss():
    with pytest.raises(sf.UsageError, match="`closure` must be a function that returns the loss; got 3"):
        stabilizer().step(3)
    with pytest.raises(sf.UsageError, match="the closure returned None"):
        stabilizer().step(lambda: None)
    with pytest.raises(sf.UsageError, match="`loss_fn` must be a function that returns the loss; got None"):
        stabilizer().run_microbatches(None, X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: stabilizer().resume(3), "`loader` must give batches"),
        (lambda: stabilizer().resume([X], epochs="2"), "`epochs` must be a whole number"),
        (lambda: stabilizer().epochs(-1), "`total` must be a whole number, and not negative; got -1"),
        (lambda: sf.clip_gradients(nn.Linear(2, 1), None), "`clip` must be a number or a clipper; got None"),
        (lambda: sf.clip_gradients(3, 1.0), "`parameters` must be a model"),
        (lambda: sf.clip_gradients([None], 1.0), "one of them is None"),
        (lambda: sf.GradientMonitor("model"), r"`model` must be a torch\.nn\.Module; got 'model'"),
        (lambda: sf.parameter_report([]), r"`model` must be a torch\.nn\.Module"),
        (lambda: sf.Stateful(sf.Spike()).update(loss="a"), "signal 'loss' must be one number; got 'a'"),
        (lambda: sf.Stateful(sf.ClipByNorm(1.0)).update(loss=1.0), "is a clipper, which judges no step"),
        (lambda: sf.Stateful(sf.Spike()).load_state_dict({}), "`state` must be the result of `state_dict"),
        (lambda: sf.judge_losses(3), "`losses` must be a list of numbers; got 3"),
        (lambda: sf.judge_losses("2.3"), "`losses` must be a list of numbers; got '2.3'"),
    ],
)
def test_wrong_input_to_a_public_function_is_one_clear_error(call, words):
    with pytest.raises(sf.SurefootError, match=words):
        call()


@pytest.mark.parametrize("wrong", [0, "a", 1.5])
def test_the_number_of_steps_of_a_preset_is_checked(wrong):
    with pytest.raises(sf.SettingError, match="`total_steps` must be a whole number of at least 1; got "):
        sf.presets.for_transformer(*parts(), total_steps=wrong)


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [("num_steps", "a"), ("num_steps", 1.5), ("num_steps", None), ("seconds", NAN), ("seconds", "60"), ("clip", "1")],
)
def test_numbers_of_the_preflight_are_checked(setting, wrong):
    with pytest.raises(sf.SettingError, match=f"`{setting}` must be "):
        sf.debug_training_stability(nn.Linear(2, 1), [(X, X[:, :1])], nn.MSELoss(), show=False, **{setting: wrong})


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("every_minutes", "a"),
        ("every_minutes", NAN),
        ("keep_last", "a"),
        ("keep_evidence", 0.5),
        ("signals", 3),
        ("signals", ["SIGTERM"]),
    ],
)
def test_settings_of_checkpoints_are_checked(tmp_path, setting, wrong):
    with pytest.raises(sf.SettingError, match=f"`{setting}` must be "):
        sf.CheckpointManager(tmp_path, **{setting: wrong})


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [("sinks", 3), ("sinks", "tb"), ("limits", 3), ("progress", 3), ("device_seconds", -1), ("device_seconds", "5")],
)
def test_settings_of_the_log_are_checked_before_the_folder_is_made(tmp_path, setting, wrong):
    with pytest.raises(sf.SettingError, match=f"`{setting}` must be "):
        sf.RunLog(tmp_path / "run", **{setting: wrong})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("every_seconds", "a"),
        ("pause_seconds", -1),
        ("timeout_seconds", NAN),
        ("attempts", "a"),
        ("heartbeat_seconds", "60"),
        ("headers", 3),
    ],
)
def test_settings_of_the_webhook_are_checked(setting, wrong):
    with pytest.raises(sf.SettingError, match=f"`{setting}` must be "):
        sf.WebhookSink("http://127.0.0.1:9/", **{setting: wrong})

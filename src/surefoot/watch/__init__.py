"""`surefoot run`: observe any PyTorch script from outside, change nothing in it, and end with a diagnosis.

`commands.run` reads the command line; `run_script` runs the script as `python` would, and `torch_import` waits for it
to import torch. `patches` reports the calls that make a training loop (backward, step, clip, scale, load) to the parts
of the `watcher`: `backward_observer`, `step_observer` and, for the few steps observed in depth, `step_sampler`. What
they find is written as facts into the run folder; `surefoot.diagnose` draws the conclusions.
"""

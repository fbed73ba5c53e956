"""`surefoot run`: watch an unmodified script and change nothing in it.

`command` reads the command line, `execute` runs the script as `python` would, `arrival` waits for the script to import
torch, and `watcher` joins what looks at it: `patches` sees the calls that make a training loop (backward, step, clip,
scale, load), `look` goes deep on a few steps with hooks and a `tape` of operations, `graph` reads the autograd graph,
`autopsy` finds where the first non-finite value came from. What they learn is written as facts into the run folder;
`surefoot.diagnose` draws the conclusions from there.
"""

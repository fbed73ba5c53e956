"""`python -m surefoot` is the command line."""

from surefoot.entry import main

main()

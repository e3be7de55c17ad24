"""`python -m locum` is the `locum` command."""

from locum.commands import main

main()

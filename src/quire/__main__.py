"""`python -m quire`: the same as the `quire` command."""

from quire.cli.app import main

main()

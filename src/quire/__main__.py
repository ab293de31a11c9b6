"""`python -m quire` runs the `quire` command."""

from quire.cli.main import main

main()

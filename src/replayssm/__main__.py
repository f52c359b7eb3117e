"""`python -m replayssm`: the command line without an installed script."""

from replayssm.cli import main

main()

"""`python -m esper` is `esper`, for machines where the script is not on the path."""

from esper.cli import main

main()

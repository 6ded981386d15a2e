"""`esper`, and `python -m esper` for machines where the script is not on the path."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C ends the process without a word until there is something to close."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from esper.cli import main as run

    run()


if __name__ == "__main__":
    main()

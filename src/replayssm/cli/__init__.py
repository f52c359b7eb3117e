"""The `replayssm` command."""


def main() -> None:
    """Entry point of the `replayssm` command."""
    from replayssm.cli.app import app

    app()

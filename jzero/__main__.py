"""The command line: `python -m jzero plan`, or `jzero plan`; explain, verify, export, deepspeed."""

from __future__ import annotations

import sys

import tyro

from jzero.cli.deepspeed import DeepSpeedCommand
from jzero.cli.files import ExportCommand, VerifyCommand
from jzero.cli.plan import ExplainCommand, PlanCommand

COMMANDS = {
    "plan": PlanCommand,
    "explain": ExplainCommand,
    "verify": VerifyCommand,
    "export": ExportCommand,
    "deepspeed": DeepSpeedCommand,
}


def main(args: list[str] | None = None) -> int:
    """Runs a command; bad input is one clear error and exit code 2."""
    config = (tyro.conf.OmitSubcommandPrefixes,)
    command = tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="jzero", args=args, config=config)
    try:
        return command.run()
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""The command, run in this process."""

import json

from typer.testing import CliRunner

from hf_favorpp.cli.app import app


def run(*argv, code=0):
    """Run the command, check its exit code, and return what it wrote."""
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(word) for word in argv])
    assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr, result.exception)
    return result


def run_json(*argv, code=0):
    """Run the command with --json, and return its document: all that is on standard output."""
    return json.loads(run(*argv, "--json", code=code).stdout)

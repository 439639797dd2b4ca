"""Entry point of `sam3-node` and `python -m sam3_node`. Ctrl-C is quiet from its first line on."""

import os
import signal
import sys

# before all other imports, which take a part of a second: there is nothing to close yet
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from .processes.signals import INTERRUPTED, exit_on_interrupt, raise_on_interrupt  # noqa: E402

MISSING_EXTRA = 2
"""Exit code of errors, as in cli.parser, which a module may keep from being imported."""


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from .cli.main import main as run_command
        from .cli.parser import DEVICE_FAILED
    except ModuleNotFoundError as error:
        return _explain(error)
    try:
        raise_on_interrupt()
        code = run_command()
        exit_on_interrupt()
    except ModuleNotFoundError as error:
        code = _explain(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    exit_on_interrupt()
    if code in (INTERRUPTED, DEVICE_FAILED):
        # leave without the interpreter's exit: it would wait for threads, such as a download's, or for a GPU
        import logging

        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _explain(error: ModuleNotFoundError) -> int:
    """Print which extra has a module, and return the exit code. Raises the error for a module of no extra."""
    from .errors import explain_missing

    missing = explain_missing(error)
    if missing is None:
        raise error
    # an installation of the client alone also has help and doctor
    from .cli.light import run_light

    code = run_light(sys.argv[1:])
    if code is not None:
        return code
    print("sam3-node: error:", missing, file=sys.stderr)
    return MISSING_EXTRA


if __name__ == "__main__":
    sys.exit(main())

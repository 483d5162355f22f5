"""Entry point of `python -m meshpar`. Ctrl-C also ends it quietly during imports."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command."""
    from meshpar.cli.main import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nmeshpar: interrupted\n")
    os._exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
    signal.signal(signal.SIGINT, _leave)  # until `interrupts.Watch` listens

if __name__ == "__main__":
    main()

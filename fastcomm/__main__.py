"""The program: the command ``fastcomm``, and ``python -P -m fastcomm``."""

import gc
import signal
import sys


def main() -> None:
    """Run the command line, without modules of the working directory.

    Until the command starts, signals end the process without a message. Once it has ended, they
    are ignored while temporary files are removed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastcomm.process import (
        collect_rarely,
        drop_relative_homes,
        drop_working_directory,
        leave_out_pandas,
    )

    drop_working_directory()
    drop_relative_homes()
    leave_out_pandas()
    collect_rarely()
    from fastcomm.cli.main import main as command
    from fastcomm.process import SIGNALS, handle

    handle()
    try:
        command(prog_name="fastcomm")
    except KeyboardInterrupt:  # where the command line does not answer it
        sys.exit(1)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Else the interpreter searches all objects for cycles as it ends: 0.15 s.
        gc.freeze()


if __name__ == "__main__":
    main()

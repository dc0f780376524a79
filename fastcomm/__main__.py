"""The program: the command ``fastcomm``, and ``python -P -m fastcomm``."""

import signal
import sys


def main() -> None:
    """Run the command line, without modules of the working directory.

    Signals end it without a word until it begins. They are ignored once it has ended, while
    what remains is removed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastcomm.process import drop_relative_homes, drop_working_directory

    drop_working_directory()
    drop_relative_homes()
    from fastcomm.cli import main as command
    from fastcomm.process import SIGNALS, handle

    handle()
    try:
        command(prog_name="fastcomm")
    except KeyboardInterrupt:  # where the command line does not answer it
        sys.exit(1)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()

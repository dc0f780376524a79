"""The program: the command ``fastcomm``, and ``python -P -m fastcomm``."""

from fastcomm.import_path import drop_working_directory


def main() -> None:
    """Run the command line, without modules of the working directory."""
    drop_working_directory()
    from fastcomm.cli import main as command

    command(prog_name="fastcomm")


if __name__ == "__main__":
    main()

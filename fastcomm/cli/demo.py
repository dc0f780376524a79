"""``fastcomm demo``."""

import click


@click.command("demo")
@click.argument("directory", default="fastcomm-demo", type=click.Path(file_okay=False))
@click.option(
    "--ranks", type=click.IntRange(1), default=8, show_default=True, help="Size of the job."
)
@click.option(
    "--link-bandwidth",
    metavar="RATE",
    default="400Gbit/s",
    show_default=True,
    help="Bandwidth of one GPU's link, one direction.",
)
@click.pass_context
def run(ctx: click.Context, /, directory: str, ranks: int, link_bandwidth: str) -> None:
    """Write a made-up training job as real traces, and measure it.

    A mixture-of-experts model on tensor, pipeline, data and expert parallel ranks: forward,
    backward, 1F1B, optimizer, some communication hidden and some not, and one straggler. The
    files in DIRECTORY are what the PyTorch profiler would write, one a rank.
    """
    from pathlib import Path

    from fastcomm.cli import metrics
    from fastcomm.synthetic import Job, write

    job = Job.of(ranks=ranks)
    paths = write(job, Path(directory))
    command = f"fastcomm metrics {directory} --link-bandwidth {link_bandwidth}"
    click.echo(f"wrote {len(paths)} traces to {directory}; now: {command}\n", err=True)
    ctx.invoke(metrics.run, paths=tuple(map(str, paths)), link_bandwidth=link_bandwidth)

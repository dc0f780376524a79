"""Compile the kernels: every command runs once, on small inputs, and some on more."""

import tempfile
from pathlib import Path

from builders.commands import words_of
from builders.places import RECORDED
from fuzz import options
from fuzz.seeds import SEEDS

from fastcomm.dispatch import workload
from fastcomm.dispatch.recipe import Recipe
from fastcomm.preparation import compile_critical_path

# Inputs and options with kernels of their own.
SEEDED = ("rank0.pftrace", "nsys_0.sqlite", "uniform.json")
MORE = (
    "critical-path {run} --annotation ProfilerStep --save saved -o tables",
    "critical-path {run} --annotation ProfilerStep --compat hta --save saved --overlay o.json",
    "hang {recorded}/running_pipeline_late_0",
    "dispatch compare --num-nodes 2 --seq-len 64 --iter-num 1 --law bimodal",
    "dispatch simulate {nodes} --schedules fast,fast-published",
    "dispatch place {nodes} --load {loads} --max-moves 4",
    "dispatch place {nodes} --max-moves 4 --replicas 1",
)
LOADS = "step,layer,expert,tokens\n" + "".join(
    f"{step},0,{expert},{1 + 9 * (expert == step)}\n"
    for step in range(4)
    for expert in range(16)
)


def compile_all(folder: Path) -> None:
    """Run every command, and what else has kernels, in a folder."""
    inputs = options.make(folder) | {"recorded": str(RECORDED / "hangs")}
    for name in options.commands():
        options.run(options.base(name, inputs))
    inputs["nodes"] = str(folder / "nodes")
    recipe = Recipe.of(num_nodes=2, gpus_per_node=4, seq_len=64, iter_num=1)
    workload.write(recipe, folder / "nodes")
    (folder / "loads.csv").write_text(LOADS)
    inputs["loads"] = str(folder / "loads.csv")
    for words in MORE:
        kind, message = options.run(words_of(words, **inputs))
        assert kind in ("read", "slow"), message  # slow, as kernels compile
    for name in SEEDED:
        SEEDS[name].make(folder / name)
        SEEDS[name].read(folder / name)


if __name__ == "__main__":
    compile_critical_path("hta")
    with tempfile.TemporaryDirectory() as made:
        compile_all(Path(made))

"""Train with a callback of `docs/trainer.md`: ``callbacks.py PACKAGE``, in an empty directory.

Started by `check.py`. The code of the page runs as it stands there, and twenty steps in one
process end its first window.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import Dataset

_PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"
STEPS, WIDTH = 20, 32


def code(title, without=""):
    """Run the Python code below a title of the page; return its names."""
    section = _PAGE.read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {"__name__": "page"}
    exec(compile(text.removesuffix(without), str(_PAGE), "exec"), names)
    return names


class Batches(Dataset):
    """Random inputs, and their sums."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "labels": inputs.sum()}


class Model(nn.Module):
    """A layer, with the loss as first output."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, inputs, labels):
        outputs = self.layer(inputs)[:, 0]
        return {"loss": ((outputs - labels) ** 2).mean(), "outputs": outputs}


def lightning():
    """Train with Lightning."""
    callback = code("Lightning")["Windows"]()
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        """The model as Lightning trains it."""

        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(callbacks=[callback], max_epochs=1, accelerator="cpu", **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches()))


def transformers():
    """Train with the trainer of Hugging Face."""
    callback = code("Hugging Face")["Windows"]()
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="output",
        per_device_train_batch_size=1,
        num_train_epochs=1,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(Model(), arguments, train_dataset=Batches(), callbacks=[callback]).train()


def torchtitan():
    """Train a model of our own with what stands in for the profiler of torchtitan."""
    names = code("torchtitan", without="main()\n")
    built = names["Profiler"].build_torch_profiler
    assert built is names["windows"]
    profiler = built(SimpleNamespace(), global_step=0)
    model, batches = Model(), Batches()
    for place in range(STEPS):
        batch = {name: value[None] for name, value in batches[place].items()}
        model(**batch)["loss"].backward()
        profiler.step()
    profiler.stop()


if __name__ == "__main__":
    {"lightning": lightning, "transformers": transformers, "torchtitan": torchtitan}[
        sys.argv[1]
    ]()

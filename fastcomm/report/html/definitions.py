"""Select the definitions that a page needs, in the words of its run."""

from collections.abc import Set
from dataclasses import replace

from fastcomm.report.html.glossary import GLOSSARY, Definition

# Words of a device, and those of a run without one; longer ones first.
_HOST = (
    ("a compute kernel runs", "an operator runs"),
    ("no compute kernel does", "no operator does"),
    ("no compute kernel", "no operator"),
    ("a communication kernel", "a collective"),
    ("nothing runs on the device", "no operator and no communication runs"),
    ("the GPU is idle", "the rank is idle"),
    ("GPU's link", "rank's link"),
    ("step and GPU", "step and rank"),
)


def definitions(keys: Set[str], *, is_host_run: bool) -> dict[str, Definition]:
    """Return the definitions of some keys, in the order of the glossary."""
    chosen = {key: GLOSSARY[key] for key in GLOSSARY if key in keys}
    return (
        {key: _of_host(definition) for key, definition in chosen.items()}
        if is_host_run
        else chosen
    )


def _of_host(definition: Definition) -> Definition:
    """Return a definition in words of a run without a device."""
    name, meaning = definition.name, definition.meaning
    for device, host in _HOST:
        name, meaning = name.replace(device, host), meaning.replace(device, host)
    return replace(definition, name=name, meaning=meaning)
